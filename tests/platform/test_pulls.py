"""Chats on two prefill and two decode workers: what a worker has is not computed by another. Real UCX, real pages."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from diptych.engine.sim.known_answers import KnownAnswers
from diptych.v1 import bootstrap_pb2

Platform = Any  # the fixture's class: test helpers can't be imported

PAGE = 16
NUM_TURNS = 20
NUM_TOKENS = 80  # of each answer
OPTIONS = ("--model", "sim", "--device", "sim", "--max-model-len", "8000")
TIMING = "step=1000,prompt=300,request=0,context=0"  # microseconds: an answer of 80 tokens takes 24 ms to compute again


@pytest.fixture(scope="module")
def platform(
    platform_class: type[Platform], tmp_path_factory: pytest.TempPathFactory, wait_for: Callable[..., Any]
) -> Iterator[Platform]:
    sizes = {"DIPTYCH_KV_CACHE_MIB": "16", "DIPTYCH_SIM_TIMING": TIMING}
    started = platform_class(
        tmp_path_factory.mktemp("pulls") / "log", prefill=2, decode=2, options=OPTIONS, DIPTYCH_KV_PULL="on", **sizes
    )
    wait_for(lambda: num_links(started) == [3] * 4, 200.0, "links, of workers of one role with each other, too")
    yield started
    started.stop()


def num_links(platform: Platform) -> list[int]:
    """Return how many links each worker has; nothing while one that was killed is a member still."""
    with contextlib.suppress(grpc.RpcError):
        return sorted(len(status.instance.load.linked_instances) for status in platform.statuses())
    return []


def expected(known: KnownAnswers, prompt: list[int]) -> list[int]:
    """Return the only right answer, which goes on behind what would end it."""
    output: list[int] = []
    while len(output) < NUM_TOKENS:
        output += known.tokens([*prompt, *output], NUM_TOKENS - len(output))
    return output


def chat(platform: Platform, number: int, num_turns: int) -> tuple[list[int], list[int]]:
    """Have a chat whose every answer is right; return how many tokens each turn's prompt has, and finds cached."""
    known, rng = KnownAnswers(), random.Random(number)
    prompt, lens, cached = [*range(100, 140)], list[int](), list[int]()
    for _ in range(num_turns):
        prompt += rng.choices(range(100, 200), k=rng.randrange(20, 40))
        answer = platform.complete(prompt, NUM_TOKENS, ignore_eos=True, return_token_ids=True)
        lens.append(len(prompt))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        output = answer["choices"][0]["token_ids"]
        assert output == expected(known, prompt)
        prompt += output
    return lens, cached


def test_of_twenty_turns_prefill_computes_what_is_new(platform: Platform) -> None:
    lens, cached = chat(platform, 0, NUM_TURNS)
    new = [end - start - NUM_TOKENS for start, end in itertools.pairwise(lens)]
    computed = [end - found for end, found in zip(lens[1:], cached[1:], strict=True)]
    assert all(abs(done - fresh) <= PAGE for done, fresh in zip(computed, new, strict=True)), (computed, new)
    platform.assert_clean()
    statuses = platform.statuses()
    decode = [status for status in statuses if status.instance.role == bootstrap_pb2.ROLE_DECODE]
    assert sum(status.pages_pulled for status in statuses) == sum(status.pages_lent for status in statuses)
    assert sum(status.pages_lent for status in decode) >= (NUM_TURNS - 1) * NUM_TOKENS // PAGE
    assert sum(status.pulls_wrong + status.pulls_missed for status in statuses) == 0
    assert sum(status.pull_saved_s for status in statuses) > 0


def test_answers_are_right_when_a_holder_is_killed_while_others_pull_from_it(
    platform: Platform, wait_for: Callable[..., Any]
) -> None:
    lent = sum_lent(platform)
    with ThreadPoolExecutor(6) as pool:
        chats = [pool.submit(chat, platform, number, 8) for number in range(1, 7)]
        wait_for(lambda: sum_lent(platform) > lent, 200.0, "somebody pulls")
        platform.kill("decode")
        assert all(len(each.result()[0]) == 8 for each in chats)
    wait_for(lambda: num_links(platform) == [3] * 4, 200.0, "another one is linked")
    platform.assert_clean()
    assert sum(status.pulls_wrong for status in platform.statuses()) == 0


def sum_lent(platform: Platform) -> int:
    return sum(status.pages_lent for status in platform.statuses())
