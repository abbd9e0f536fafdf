"""Two prefill workers with small pools and real files: who has a prompt in its files gets it, and loads it."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from diptych.cli.platform.console_code import operator_token
from diptych.v1 import bootstrap_pb2

PAGE = 16
NUM_TOKENS = 130 * PAGE + 1  # long enough to be written when it is evicted the first time
NUM_PROMPTS = 8
NUM_AGAIN = 4  # which have left the pools
OPTIONS = ("--model", "sim", "--device", "sim", "--max-model-len", "4096")
TIMING = "step=1000,prompt=300,request=0,context=0"  # microseconds: to compute a prompt takes 0.6 s
Platform = Any  # the fixture's class: test helpers can't be imported


def prompt(number: int) -> list[int]:
    return [number, *(place % 200 for place in range(NUM_TOKENS - 1))]


@pytest.fixture(scope="module")
def platform(start_shared: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    files = str(tmp_path_factory.mktemp("files"))
    sizes = {"DIPTYCH_KV_CACHE_MIB": "8", "DIPTYCH_FILE_CACHE_DIR": files, "DIPTYCH_FILE_CACHE_MIB": "256"}
    return start_shared(prefill=2, options=OPTIONS, DIPTYCH_SIM_TIMING=TIMING, **sizes)


def prefills(platform: Platform) -> dict[int, Any]:
    """Return the status of each prefill worker, by instance."""
    told = [each for each in platform.statuses() if each.instance.role == bootstrap_pb2.ROLE_PREFILL]
    return {each.instance.instance_id: each for each in told}


def asked(platform: Platform, number: int, name: str) -> tuple[int, int, Any]:
    """Return who computed a prompt, how much of it was cached, and why it was chosen."""
    body = {"model": "", "prompt": prompt(number), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    status, answer = platform.post("/v1/completions", body, headers={"x-request-id": name})
    assert status == 200, answer
    token = {"Authorization": f"Bearer {operator_token(platform.trust())}"}
    path = urllib.request.Request(f"{platform.url}/admin/explain/{name}", headers=token)
    with urllib.request.urlopen(path, timeout=200) as told:
        (request,) = json.load(told)["requests"]
    (attempt,) = request["attempts"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(attempt["prefill_instance"], 16), cached, attempt


def prices(platform: Platform) -> list[float]:
    """Return what each prefill worker says that a load from its files takes."""
    return [tier.base_s for status in prefills(platform).values() for tier in status.instance.load.tiers]


def test_a_prompt_goes_to_who_has_it_in_files_and_is_loaded_there(
    platform: Platform, wait_for: Callable[..., Any]
) -> None:
    homes = {number: asked(platform, number, f"first-{number}")[0] for number in range(NUM_PROMPTS)}
    assert len(set(homes.values())) == 2, "both workers have some"
    wait_for(lambda: max(prices(platform), default=math.inf) < math.inf, 200.0, "both have measured their files")
    before = prefills(platform)
    for number in range(NUM_AGAIN):
        home, cached, attempt = asked(platform, number, f"again-{number}")
        chosen = next(each for each in attempt["workers"] if int(each["instance"], 16) == home)
        assert (home, cached) == (homes[number], NUM_TOKENS - 1)
        assert [(load["tier"], load["start"], load["end"]) for load in chosen["loads"]] == [
            ("files", 0, NUM_TOKENS - 1)
        ]
        best, other = attempt["pairs"]
        assert best["restore_s"] == pytest.approx(chosen["loads"][0]["load_s"])
        assert (best["restore_s"] > 0, other["restore_s"]) == (True, 0)
    after = prefills(platform)
    read = {key: after[key].files.pages_read - before[key].files.pages_read for key in after}
    numbers = range(NUM_AGAIN)
    assert read == {key: NUM_TOKENS // PAGE * sum(homes[number] == key for number in numbers) for key in after}
    platform.assert_clean()
