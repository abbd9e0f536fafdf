"""Workers of two scheduler groups each, on a tiny model: routers pair the groups, and one can die alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import TrustConfig
from diptych.engine import Engine, SamplingParams
from diptych.v1 import bootstrap_pb2, worker_pb2, worker_pb2_grpc

Platform = Any
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, *range(30 + 3 * first)] for first in range(16)]


@pytest.fixture
def platform(start_platform: Callable[..., Platform], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    monkeypatch.setenv("DIPTYCH_DP", "2")
    monkeypatch.setenv("DIPTYCH_POLICY", "least_load")  # every group gets requests
    monkeypatch.setenv("DIPTYCH_KV_CACHE_MIB", "8")
    return start_platform(options=("--model", str(tiny_folder), "--device", "sim"))


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, reference: Callable[..., Engine]) -> list[tuple[int, ...]]:
    engine = reference(tiny_folder, device="sim", sim_timing=("none",))
    return [each.token_ids for each in engine.generate_batch(PROMPTS, GREEDY)]


def complete_all(platform: Platform) -> list[tuple[int, ...]]:
    def complete(prompt: list[int]) -> tuple[int, ...]:
        answer = platform.complete(prompt, GREEDY.max_tokens, ignore_eos=True, return_token_ids=True)
        return tuple(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(complete, PROMPTS))


def groups(platform: Platform, role: str) -> list[psutil.Process]:
    """The scheduler processes of the worker of a role."""
    (worker,) = platform.components(role)
    return [child for child in worker.children() if "diptych.unified.scheduler" in child.cmdline()]


def workers(platform: Platform) -> list[bootstrap_pb2.Instance]:
    return [each for each in platform.instances() if each.role != bootstrap_pb2.ROLE_ROUTER]


def test_groups_are_paired_and_one_of_each_side_can_die_alone(
    platform: Platform, expected: list[tuple[int, ...]], wait_until: Callable[..., Any]
) -> None:
    links = [3, 3, 3, 3]
    wait_until(lambda: sorted(len(each.load.linked_instances) for each in workers(platform)) == links, 200.0, "links")
    members = workers(platform)
    assert sorted((each.role, each.dp_rank) for each in members) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert len({(each.role, each.address) for each in members}) == 2

    def all_have_moved_kv() -> bool:
        assert complete_all(platform) == expected
        return all(each.pages_sent + each.pages_received > 0 for each in platform.statuses())

    wait_until(all_have_moved_kv, 200.0, "every group gets requests")
    platform.assert_clean()
    statuses = platform.statuses()
    assert sum(each.pages_sent for each in statuses) == sum(each.pages_received for each in statuses)

    with (
        open_sync_channel(members[0].address, TrustConfig().trust()) as channel,
        pytest.raises(grpc.RpcError, match="no instance 0000000000000000 here"),
    ):
        worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.StatusRequest(), timeout=200)

    workers_before = {process.pid for role in ("prefill", "decode") for process in platform.components(role)}
    for victim, num_left in (("prefill", 3), ("decode", 2)):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: [complete_all(platform) for _ in range(4)])
            groups(platform, victim)[0].kill()
            assert running.result() == [expected] * 4
        wait_until(lambda num_left=num_left: len(workers(platform)) == num_left, 200.0, "the dead group has left")
        assert complete_all(platform) == expected
        platform.assert_clean()
    assert workers_before == {process.pid for role in ("prefill", "decode") for process in platform.components(role)}
