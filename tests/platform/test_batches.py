"""Batches on real processes that are killed: every line is answered once, with the tokens that it must have."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from diptych.engine.sim.known_answers import KnownAnswers

Platform = Any
OPTIONS = ("--model", "sim", "--device", "sim", "--unified", "1")
NUM_LINES = 40
PROMPTS = [f"line {number} of many" for number in range(NUM_LINES)]
MAX_TOKENS = 24


@pytest.fixture
def start(tmp_path: Path, platform_class: Callable[..., Platform]) -> Iterator[Callable[[str, str], Platform]]:
    """Start a platform with the same store as those before it."""
    running: list[Platform] = []

    def start(name: str, timing: str) -> Platform:
        settings = {"BATCH_STORE": str(tmp_path / "store"), "BATCH_LEASE_S": "1", "BATCH_CONCURRENCY": "2"}
        variables = {f"DIPTYCH_{key}": value for key, value in settings.items()}
        (tmp_path / name).mkdir()
        speed = {"DIPTYCH_SIM_TIMING": timing, "DIPTYCH_KV_CACHE_MIB": "16", "DIPTYCH_CONSOLE": "off"}
        running.append(
            platform_class(tmp_path / name / "log", prefill=0, decode=0, options=OPTIONS, **speed, **variables)
        )
        return running[-1]

    yield start
    for each in running:
        each.stop()


def begin(client: openai.OpenAI) -> str:
    bodies = [{"model": "sim", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0} for prompt in PROMPTS]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return batch.id


def wait_until(platform: Platform, batch_id: str, is_so: Callable[[Any], bool]) -> Any:
    """Return the batch once it is so; a router that is being started again answers later."""
    deadline = time.monotonic() + 200
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key="none", max_retries=0) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(openai.APIConnectionError):
                batch = client.batches.retrieve(batch_id)
                if is_so(batch):
                    return batch
            time.sleep(0.02)
    raise AssertionError(platform.log.read_text()[-5000:])


def test_a_batch_outlives_all_processes(start: Callable[[str, str], Platform]) -> None:
    first = start("first", "step=50000")  # the batch would take half a minute
    with openai.OpenAI(base_url=f"{first.url}/v1", api_key="none") as client:
        batch_id = begin(client)
    begun = wait_until(first, batch_id, lambda batch: batch.request_counts.completed > 0)
    assert begun.status == "in_progress"
    processes = first.tree()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    first.process.wait(200)
    second = start("second", "none")
    batch = wait_until(second, batch_id, lambda batch: batch.status == "completed")
    with openai.OpenAI(base_url=f"{second.url}/v1", api_key="none") as client:
        found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert (batch.request_counts.total, batch.error_file_id) == (NUM_LINES, None)
    assert sorted(int(each["custom_id"]) for each in found) == list(range(NUM_LINES))
    known = KnownAnswers()
    for each in found:
        text = each["response"]["body"]["choices"][0]["text"]
        assert text == known.completion(PROMPTS[int(each["custom_id"])], MAX_TOKENS)
