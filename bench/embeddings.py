"""Vectors of prompts: their speed beside transformers, and what they cost requests for text on the same workers.

Models are random, of Qwen 3's architecture. The first part serves an embedding model by `diptych up` with one prefill
worker, and gives transformers the same prompts in the same batches, with as many threads. The second part serves a
model for text on a prefill and a decode worker that simulate an H200's steps (`--device sim`, so that the machine's own
speed does not matter), and asks for first tokens one after the other: alone, and beside a stream of documents to be
ranked, which is work for idle time.

    python bench/embeddings.py [--quick] [--json] [--threads N]
"""

from __future__ import annotations

import http.client
import json
import os
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

VOCAB: Final = 1024
SPECIAL: Final = ("<|im_start|>", "<|im_end|>")
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
}
BATCH: Final = 16


def save(folder: Path, kind: str) -> Any:
    """Return a random model of transformers, saved with a tokenizer of words."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.Qwen3Config(**SHAPE)).eval()
    model.save_pretrained(folder)
    words = ["yes", "no", *(f"w{i}" for i in range(VOCAB - 2 - len(SPECIAL)))]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    return model


@contextmanager
def platform(folder: Path, *options: str) -> Iterator[int]:
    """Yield the HTTP port of a platform that serves the model in a folder."""
    os.environ["DIPTYCH_MODEL"], os.environ["DIPTYCH_KV_CACHE_MIB"] = str(folder), "256"
    with serve.platform_with(options) as (port, _):
        yield port


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    found = json.load(answer)
    connection.close()
    assert answer.status == 200, found
    return found


def tokens_per_s(passes: list[list[list[int]]], embed: Any) -> float:
    """The fastest of several passes over batches of prompts."""
    speeds = []
    for prompts in passes:
        began = time.perf_counter()
        for at in range(0, len(prompts), BATCH):
            embed(prompts[at : at + BATCH])
        speeds.append(sum(map(len, prompts)) / (time.perf_counter() - began))
    return max(speeds)


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(2, VOCAB - 8, (count, length)).tolist()  # type: ignore[no-any-return]


def measure_speed(out: report.Report, num_prompts: int, lengths: list[int], threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        model = save(Path(folder), "Qwen3Model")

        def by_transformers(batch: list[list[int]]) -> None:
            with torch.inference_mode():
                model(torch.tensor(batch)).last_hidden_state[:, -1].numpy()

        with platform(
            Path(folder), "--device", "cpu", "--prefill", "1", "--decode", "0", "--threads", str(threads)
        ) as port:
            for length in lengths:
                passes = [random_prompts(num_prompts, length, seed) for seed in range(3)]  # nothing is cached

                def by_us(batch: list[list[int]], port: int = port) -> None:
                    post(port, "/v1/embeddings", {"input": batch, "encoding_format": "base64"})

                ours, theirs = tokens_per_s(passes, by_us), tokens_per_s(passes, by_transformers)
                out.row("embeddings", f"{length} tokens", ours, "tokens/s", theirs, "transformers", ours / theirs)


def first_tokens(port: int, count: int, pause_s: float) -> list[float]:
    """Seconds to the first token of requests for text, one after the other."""
    found = []
    for prompt in random_prompts(count, 1024, seed=int(time.monotonic_ns() % 2**31)):
        began = time.perf_counter()
        post(port, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        found.append(time.perf_counter() - began)
        time.sleep(pause_s)  # so that there is idle time
    return found


def rank_for_ever(port: int, stop: threading.Event) -> int:
    """Have fresh documents ranked until told to stop; return their tokens."""
    rng, num_tokens = np.random.default_rng(threading.get_ident()), 0
    while not stop.is_set():
        documents = [" ".join(f"w{i}" for i in rng.integers(0, 900, 1024)) for _ in range(8)]
        found = post(port, "/v1/rerank", {"query": "w1 w2", "documents": documents, "return_documents": False})
        num_tokens += found["usage"]["total_tokens"]
    return num_tokens


def measure_beside(out: report.Report, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), "Qwen3ForCausalLM")
        os.environ["DIPTYCH_SIM_TIMING"] = "h200"
        with platform(Path(folder), "--device", "sim") as port, ThreadPoolExecutor(2) as pool:
            first_tokens(port, 5, 0.0)
            alone = first_tokens(port, count, 0.05)
            stop = threading.Event()
            began = time.perf_counter()
            ranking = [pool.submit(rank_for_ever, port, stop) for _ in range(2)]
            time.sleep(1.0)  # the stream has begun
            beside = first_tokens(port, count, 0.05)
            stop.set()
            ranked = sum(each.result() for each in ranking) / (time.perf_counter() - began)
    for name, share in (("p50", 50), ("p99", 99)):
        value, base = (1e3 * float(np.percentile(times, share)) for times in (beside, alone))
        out.row("embeddings", f"first token {name} beside ranks", value, "ms", base, "alone", base / value)
    out.row("embeddings", "ranked meanwhile", ranked, "tokens/s")


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker and of transformers")
    options = parser.parse_args()
    with report.Report(as_json=options.json) as out:
        measure_beside(out, 100 if options.quick else 400)
        sizes = (32, [32, 256]) if options.quick else (128, [32, 128, 512])
        measure_speed(out, *sizes, options.threads)


if __name__ == "__main__":
    main()
