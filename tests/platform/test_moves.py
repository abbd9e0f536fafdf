"""Outputs go on at another worker when theirs becomes too slow for them, or leaves: real processes, UCX and pages."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.engine import Engine, SamplingParams
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, ROLE_PREFILL

Platform = Any  # the fixture's class: test helpers can't be imported

PAGE = 16
NUM_PROMPTS = 6
NUM_TOKENS = 320
TIMING = "step=3000,prompt=5,request=0,context=15"  # microseconds: six contexts of 200 tokens take 18 ms more
TPOT_MS = 12.0
SESSION = {"x-diptych-session": "one", "x-diptych-timings": "1"}


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(320), k=70 + 9 * number)


@pytest.fixture(scope="module")
def answers(tiny_folder: Path, reference: Callable[..., Engine]) -> list[list[int]]:
    """What one process makes of each prompt."""
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    engine = reference(tiny_folder, device="sim", sim_timing=("none",))
    return [list(engine.generate(prompt(number), greedy).token_ids) for number in range(NUM_PROMPTS)]


@pytest.fixture(scope="module", name="start")
def _start(
    platform_class: type[Platform], tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Platform]]:
    """Starts platforms whose sessions have all of their outputs made by one worker, which so becomes too slow."""
    started = []

    def start(*options: str, **sizes: int) -> Platform:
        platform = platform_class(
            tmp_path_factory.mktemp("moves") / "log",
            **sizes,
            options=("--model", str(tiny_folder), "--device", "sim", *options),
            DIPTYCH_KV_CACHE_MIB="4",
            DIPTYCH_SIM_TIMING=TIMING,
            DIPTYCH_PAIR_WAIT_S="30",  # for who was started again
            DIPTYCH_LOST_PAIR_WAIT_S="30",
            DIPTYCH_POLICY="consistent_hash",
            DIPTYCH_TTFT_SLO_MS="5000",
            DIPTYCH_TPOT_SLO_MS=str(TPOT_MS),
        )
        started.append(platform)
        return platform

    yield start
    for each in started:
        each.stop()


@pytest.fixture(scope="module")
def platform(start: Callable[..., Platform]) -> Platform:
    """Two workers that do both."""
    return start("--unified", "2", prefill=0, decode=0)


@pytest.fixture(scope="module")
def decoding(start: Callable[..., Platform], wait_for: Callable[..., Any]) -> Platform:
    """Two workers that only decode, and one for their prompts."""
    started = start(prefill=1, decode=2)
    wait_for(lambda: num_linked(started, 2) == 3, 200.0, "links, also between those that decode")
    return started


def ask(platform: Platform, number: int) -> tuple[list[int], dict[str, Any]]:
    """Return the output and what its workers measured."""
    body = {"model": "", "prompt": prompt(number), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    status, answer = platform.post("/v1/completions", {**body, "return_token_ids": True}, headers=SESSION)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return answer["choices"][0]["token_ids"], answer["diptych"]


def count(platform: Platform, name: str) -> int:
    """Return a counter of the router."""
    lines = [line for line in platform.metrics().splitlines() if line.startswith(f"diptych_router_{name}_total")]
    return sum(int(float(line.split()[-1])) for line in lines)


def test_outputs_that_become_too_slow_go_on_elsewhere_with_their_pages(
    platform: Platform, answers: list[list[int]], wait_for: Callable[..., Any]
) -> None:
    wait_for(lambda: num_linked(platform) == 2, 200.0, "links")
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        given = list(pool.map(lambda number: ask(platform, number), range(NUM_PROMPTS)))
    assert [tokens for tokens, _ in given] == answers
    moved = [seen for _, seen in given if seen["prefill_instance"] != seen["decode_instance"]]
    assert 1 <= len(moved) < NUM_PROMPTS, "some of them: then the others are in time again"
    assert count(platform, "moves") == count(platform, "moves_begun") == len(moved)
    assert count(platform, "replays") == 0
    check_pages(platform, moved)
    platform.assert_clean()


def check_pages(platform: Platform, moved: list[dict[str, Any]]) -> None:
    """All KV of what moved was sent: the worker that took it has computed no token of a prompt."""
    assert all(seen["whole"] and seen["prefill_kv_digest"] == seen["decode_kv_digest"] for seen in moved)
    assert all(seen["pages_moved"] >= -(-70 // PAGE) for seen in moved)
    giver, taker = sorted(platform.statuses(), key=lambda status: status.pages_received)
    num_pages = sum(seen["pages_moved"] for seen in moved)
    assert (giver.pages_sent, giver.pages_received) == (num_pages, 0)
    assert (taker.pages_sent, taker.pages_received) == (0, num_pages)
    assert giver.prefill_s > 0
    assert taker.prefill_s == 0


def num_linked(platform: Platform, num_links: int = 1) -> int:
    """Return how many workers have so many links; 0 while one that was killed is a member still."""
    with contextlib.suppress(grpc.RpcError):
        return sum(len(each.instance.load.linked_instances) == num_links for each in platform.statuses())
    return 0


def asked(platform: Platform, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Have all outputs made, beside what follows."""
    return [pool.submit(ask, platform, number) for number in range(NUM_PROMPTS)]


def busiest(platform: Platform) -> Any:
    """Return the worker that makes most of the outputs; none while nobody does: a prefill worker may have all prompts.

    All of them are never at one worker if they are slow to come: the first move away before the last is there.
    """
    makers = [each for each in platform.statuses() if each.instance.role != ROLE_PREFILL]
    most = max(makers, key=lambda each: each.open_rooms, default=None)
    return most if most is not None and most.open_rooms >= NUM_PROMPTS // 2 else None


def test_workers_that_only_decode_give_each_other_outputs(decoding: Platform, answers: list[list[int]]) -> None:
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        assert [future.result()[0] for future in asked(decoding, pool)] == answers
    assert count(decoding, "moves") == count(decoding, "moves_begun") >= 1
    assert count(decoding, "replays") == 0
    moved = [each.pages_sent for each in decoding.statuses() if each.instance.role == ROLE_DECODE]
    assert sorted(map(bool, moved)) == [False, True]
    decoding.assert_clean()


def test_a_drain_moves_what_runs_and_the_worker_is_empty_long_before_it_would_have_ended(
    platform: Platform, answers: list[list[int]], wait_for: Callable[..., Any]
) -> None:
    drained(platform, answers, wait_for, victim="")


@pytest.mark.parametrize("victim", ["", "giver", "taker"])
def test_a_drain_between_workers_that_only_decode_loses_nothing_whoever_is_killed(
    decoding: Platform, answers: list[list[int]], wait_for: Callable[..., Any], victim: str
) -> None:
    wait_for(lambda: num_linked(decoding, 2) == 3, 200.0, "links, also of whoever was started again")
    giver = drained(decoding, answers, wait_for, victim)
    if victim != "giver":  # else it is there again already
        process = decoding.process_of("decode", giver.instance)
        process.kill()
        process.wait()  # or the next one finds it still alive, and then gone


def other(platform: Platform, giver: Any) -> Any:
    """Return the other worker of its role, once it tells of itself."""
    both = [each for each in platform.statuses() if each.instance.role == giver.instance.role]
    return next((each for each in both if each.instance.instance_id != giver.instance.instance_id), None)


def drained(platform: Platform, answers: list[list[int]], wait_for: Callable[..., Any], victim: str) -> Any:
    """Have a worker leave while it makes all outputs, and perhaps kill it, or the other one; return it."""
    replays = count(platform, "replays")
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        futures = asked(platform, pool)
        giver = wait_for(lambda: busiest(platform), 200.0, "most outputs are made by one")
        taker = wait_for(lambda: other(platform, giver), 200.0, "the other one is there, too")
        dying = giver if victim == "giver" else taker
        killed = platform.process_of("decode", dying.instance) if victim else None
        begun = count(platform, "moves_begun")
        platform.drain(giver.instance, deadline_s=200.0)
        if killed is not None:
            wait_for(lambda: count(platform, "moves_begun") > begun, 200.0, "one is on its way")
            killed.kill()
        else:
            wait_for(lambda: platform.is_empty(giver.instance), 200.0, "it is empty")
            assert count(platform, "moves_begun") > begun, "it did not wait for their ends"
        assert [future.result()[0] for future in futures] == answers
    assert killed is not None or count(platform, "replays") == replays
    platform.assert_clean()
    return giver
