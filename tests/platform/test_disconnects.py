"""Clients that leave at any moment: nothing is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import select
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Platform = Any
PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,", "La vie est belle, mais"]


def post_and_leave(platform: Platform, rng: random.Random, model: str) -> None:
    """Start a request and disconnect at some point of its life: before, during or after the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", platform.http_port, timeout=200)
    prompt = rng.choice(PROMPTS) * rng.choice([1, 1, 20, 80])
    stream = rng.random() < 0.5
    body = {"model": model, "prompt": prompt, "max_tokens": rng.choice([1, 5, 40]), "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    leave_after_s = rng.choice([0.0, 0.01, 0.05, 0.2, 1.0])
    if connection.sock is not None and leave_after_s:
        connection.sock.settimeout(leave_after_s)
        with contextlib.suppress(TimeoutError, http.client.HTTPException, OSError):
            connection.getresponse().read(rng.choice([1, 200, 100_000]))
    connection.close()


def test_two_hundred_random_disconnects_leave_nothing_behind(platform: Platform) -> None:
    model = platform.model_id()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda seed: post_and_leave(platform, random.Random(seed), model), range(200)))
    platform.assert_clean(timeout_s=200.0)
    assert platform.complete(PROMPTS[0], 2)["choices"][0]["text"].startswith(" Paris")


def leave_in_the_first_step(platform: Platform, prompt: list[int]) -> None:
    """Start a request, and disconnect when both workers have it and prefill computes, or when that is over."""
    connection = http.client.HTTPConnection("127.0.0.1", platform.http_port, timeout=200)
    body = {"model": "", "prompt": prompt, "max_tokens": 8, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    while platform.num_open_legs() < 2 and not select.select([connection.sock], [], [], 0.005)[0]:
        pass
    time.sleep(0.05)  # of a step of several times as much
    connection.close()


def test_a_client_that_leaves_in_the_middle_of_a_step_ends_that_step(platform: Platform) -> None:
    num_sent: list[int] = []
    while num_sent.count(0) < 2 and len(num_sent) < 40:  # on a busy machine a step may end before its client leaves
        before = sum(status.pages_sent for status in platform.statuses())
        leave_in_the_first_step(platform, random.Random(len(num_sent)).choices(range(1000, 40_000), k=4000))
        platform.assert_clean()  # both legs have ended
        num_sent.append(sum(status.pages_sent for status in platform.statuses()) - before)
    assert num_sent.count(0) == 2, "the pages of a chunk leave when its step has run to its end"
