"""Prompts of four images with an encode worker and without: requests a second, and first tokens of text beside them.

Two platforms, one after the other: a prefill and a decode worker; and the same with an encode worker. Each process has
one thread. The model is random: a Qwen2.5-VL whose tower and text take about as long for such a prompt. All images are
new, so nothing is cached. Meanwhile one client asks for texts, one after the other: its first token's 99th percentile,
beside that of the platform without the encode worker, says whether images delay text.

What a pool can gain is bounded by its processors: with the tower taking half of a prompt's time and a core for each
process, twice as much; where processes share cores (the first line says how many there are), less or nothing.

    python bench/encode.py [--quick] [--json]
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import report
import serve

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import pictures
import tiny_vision

BENCH: Final = "encode"
SIDE: Final = 160  # pixels of an image: 400 places
NUM_IMAGES: Final = 4  # of a request
CLIENTS: Final = 4
ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
TEXT: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": ROPE,
}
TOWER: Final = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "depth": 8, "out_hidden_size": 256}
WITHOUT: Final = ("--prefill", "1", "--decode", "1", "--threads", "1")
WITH: Final = (*WITHOUT, "--encode", "1")


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    num_requests = 8 if options.quick else 24
    with tempfile.TemporaryDirectory() as folder, report.Report(as_json=options.json) as out:
        save(Path(folder))
        out.row(BENCH, "cores of this machine", os.cpu_count() or 1, "")
        rate, ttft_s = measure(folder, WITHOUT, num_requests)
        faster, later_s = measure(folder, WITH, num_requests)
        words = f"{NUM_IMAGES} images a request"
        out.row(BENCH, f"{words}/requests a second", faster, "1/s", rate, "without the pool", faster / rate)
        case = "text beside them/ttft p99"
        out.row(BENCH, case, later_s * 1e3, "ms", ttft_s * 1e3, "without the pool", later_s / ttft_s)


def save(folder: Path) -> None:
    import transformers

    vision = {**TOWER, **tiny_vision.TOWER_SHAPE, "window_size": 4 * tiny_vision.STEP, "fullatt_block_indexes": [3, 7]}
    text = {**tiny_vision.TEXT, **TEXT}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tiny_vision.TOKENS)
    tiny_vision.saved(folder, transformers.Qwen2_5_VLForConditionalGeneration, config)
    bounds = {**tiny_vision.PROCESSOR, "max_pixels": 2 * SIDE**2}
    (folder / "preprocessor_config.json").write_text(json.dumps(bounds))


def measure(folder: str, options: tuple[str, ...], num_requests: int) -> tuple[float, float]:
    """Return requests with images a second, and the 99th percentile of a text's first token in seconds."""
    with platform(folder, options) as port:
        ask(port, with_images(0))  # a warm-up
        text_s, is_over = list[float](), threading.Event()
        texts = threading.Thread(target=ask_texts, args=(port, is_over, text_s))
        texts.start()
        began_s = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda number: ask(port, with_images(number)), range(1, num_requests + 1)))
        took_s = time.monotonic() - began_s
        is_over.set()
        texts.join()
    return num_requests / took_s, float(np.percentile(text_s, 99))


@contextmanager
def platform(folder: str, options: tuple[str, ...]) -> Iterator[int]:
    settings = {"DIPTYCH_KV_CACHE_MIB": "512", "DIPTYCH_DTYPE": "float32", "DIPTYCH_MAX_STEP_TOKENS": "512"}
    os.environ.update(settings)
    with serve.platform_with(("--model", folder, "--bootstrap-port", "0", *options)) as (port, _):
        yield port


def with_images(number: int) -> list[dict[str, Any]]:
    urls = [
        pictures.data_url(pictures.file_of(pictures.picture(SIDE, SIDE, number * NUM_IMAGES + index)))
        for index in range(NUM_IMAGES)
    ]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def ask_texts(port: int, is_over: threading.Event, found_s: list[float]) -> None:
    rng = random.Random(1)
    while not is_over.is_set():
        words = "".join(rng.choices("abcdefgh ", k=64))
        began_s = time.monotonic()
        ask(port, [{"type": "text", "text": words}])
        found_s.append(time.monotonic() - began_s)


def ask(port: int, parts: list[dict[str, Any]]) -> None:
    """Ask for one token: when the answer is there, so is the first token."""
    body = {"model": "", "max_tokens": 1, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    assert answer.status == 200, said


if __name__ == "__main__":
    main()
