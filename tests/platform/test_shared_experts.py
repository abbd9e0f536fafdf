"""Decode workers whose two schedulers share experts, or networks, behind a prefill worker that is cut otherwise: they
serve, end and drain as one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.common.members.roles import Role
from diptych.common.net.rpc import open_sync_channel
from diptych.engine import Engine, SamplingParams
from diptych.v1 import bootstrap_pb2
from diptych.v1.admin_pb2 import SetRoleRequest
from diptych.v1.admin_pb2_grpc import WorkerAdminStub

Platform = Any
DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="the other one's death shows the same")
MOVING = "--rebalance-experts 40 --redundant-experts 2"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, *range(20 * first)] for first in range(8)]


@dataclass(frozen=True)
class Case:
    """A model, and what its workers are given."""

    folder: str  # the fixture
    prefill: str
    decode: str


CASES = {
    "latents and experts": Case("tiny_latent_experts_folder", "", MOVING),
    "networks": Case("tiny_tied_folder", "--tp 2", ""),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, case: Case) -> Path:
    path: Path = request.getfixturevalue(case.folder)
    return path


@pytest.fixture(scope="module")
def platform(start_shared: Callable[..., Platform], case: Case, folder: Path) -> Iterator[Platform]:
    options = ["--model", str(folder), "--threads", "1"]
    options += ["--decode-options", f"--dp 2 --dp-attention --overlap-batches 3 {case.decode}"]
    options += ["--prefill-options", case.prefill] if case.prefill else []
    variables = {"DIPTYCH_KV_CACHE_MIB": "4", "DIPTYCH_MAX_STEP_TOKENS": "64", "DIPTYCH_POLICY": "least_load"}
    running = start_shared(decode=2, options=tuple(options), **variables)
    yield running
    running.stop()  # before the next case has one


@pytest.fixture(scope="module")
def expected(folder: Path, reference: Callable[..., Engine]) -> list[tuple[int, ...]]:
    """One process has everything."""
    return [each.token_ids for each in reference(folder).generate_batch(PROMPTS, GREEDY)]


def complete_all(platform: Platform) -> list[tuple[int, ...]]:
    def complete(prompt: list[int]) -> tuple[int, ...]:
        answer = platform.complete(prompt, GREEDY.max_tokens, ignore_eos=True, return_token_ids=True)
        return tuple(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(complete, PROMPTS))


def schedulers(worker: psutil.Process) -> list[psutil.Process]:
    return [child for child in worker.children() if "diptych.unified.scheduler" in child.cmdline()]


def ready_decoders(platform: Platform) -> list[bootstrap_pb2.Instance]:
    ready = [each for each in platform.instances() if each.state == bootstrap_pb2.INSTANCE_STATE_READY]
    return [each for each in ready if each.role == bootstrap_pb2.ROLE_DECODE]


def test_schedulers_that_share_decode_for_a_worker_that_is_cut_otherwise(
    platform: Platform, expected: list[tuple[int, ...]], wait_until: Callable[..., Any]
) -> None:
    wait_until(lambda: len(ready_decoders(platform)) == 4, 200.0, "both workers")
    assert sorted(each.dp_rank for each in ready_decoders(platform)) == [0, 0, 1, 1]
    assert complete_all(platform) == expected

    def num_with_kv() -> int:
        assert complete_all(platform) == expected
        return sum(each.pages_received > 0 for each in platform.statuses())

    wait_until(lambda: num_with_kv() == 4, 200.0, "each has KV of its own")
    platform.assert_clean()


def set_role(platform: Platform, instance: bootstrap_pb2.Instance, role: Role) -> None:
    with open_sync_channel(instance.address, platform.trust()) as channel:
        request = SetRoleRequest(instance_id=instance.instance_id, role=role.wire, drain_ms=20_000)
        assert WorkerAdminStub(channel).SetRole(request, timeout=200).not_ready == ""


def test_one_scheduler_prefills_for_a_while_and_the_others_decode(
    platform: Platform, expected: list[tuple[int, ...]], wait_until: Callable[..., Any]
) -> None:
    one = ready_decoders(platform)[0]

    def pages_sent() -> int:
        return sum(each.pages_sent for each in platform.statuses() if each.instance.instance_id == one.instance_id)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [complete_all(platform) for _ in range(2)])
        set_role(platform, one, Role.PREFILL)
        assert running.result() == [expected] * 2
    wait_until(lambda: complete_all(platform) == expected and pages_sent(), 200.0, "it sends what it computes")
    set_role(platform, one, Role.DECODE)
    wait_until(lambda: len(ready_decoders(platform)) == 4, 200.0, "all decode again")
    assert complete_all(platform) == expected
    platform.assert_clean()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=DEEP)])
def test_the_death_of_one_ends_all_that_share_its_experts_and_no_request(
    platform: Platform, expected: list[tuple[int, ...]], victim: int, wait_until: Callable[..., Any]
) -> None:
    worker = platform.components("decode")[victim]
    ours, before = schedulers(worker), {each.instance_id for each in ready_decoders(platform)}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [complete_all(platform) for _ in range(3)])
        ours[victim].kill()
        assert running.result() == [expected] * 3
    wait_until(lambda: not any(each.is_running() for each in ours), 200.0, "the other scheduler has ended, too")
    wait_until(
        lambda: (
            len(ready_decoders(platform)) == 4 and len({e.instance_id for e in ready_decoders(platform)} - before) == 2
        ),
        200.0,
        "the worker was started again",
    )
    platform.assert_clean()


def test_a_worker_that_drains_goes_on_stepping_for_its_last_request(
    platform: Platform, expected: list[tuple[int, ...]], wait_until: Callable[..., Any]
) -> None:
    worker = platform.components("decode")[0]
    ours = schedulers(worker)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [complete_all(platform) for _ in range(3)])
        worker.terminate()
        assert running.result() == [expected] * 3
    wait_until(lambda: not any(each.is_running() for each in ours), 200.0, "the worker has ended")
    platform.assert_clean()
