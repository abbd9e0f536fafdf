"""Two workers of two ranks each, every rank on a node of its own: `diptych up --nodes 2` with a tiny model."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from greedy_streams import greedy_stream

from diptych.common.lifecycle import PARENT_PID_VARIABLE
from diptych.common.members.roles import Role
from diptych.common.net.ports import free_port
from diptych.common.net.rpc import open_sync_channel
from diptych.v1 import bootstrap_pb2
from diptych.v1.admin_pb2 import SetRoleRequest
from diptych.v1.admin_pb2_grpc import WorkerAdminStub

Platform = Any
DEEP = pytest.mark.skipif(not os.environ.get("DIPTYCH_DEEP_CHECKS"), reason="the nodes of heads do the same")
PROMPTS = [[first, *range(20 * first)] for first in range(1, 5)]  # two for each group, where all go on one then
NUM_TOKENS = 150  # of a few ms each: a stream that has begun runs for a while


@pytest.fixture(
    scope="module",
    params=["tiny_folder", pytest.param("tiny_latent_experts_folder", marks=DEEP)],
    ids=["heads", "latents and experts"],
)
def folder(request: pytest.FixtureRequest) -> Path:
    """A fixture makes its model."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def platform(start_shared: Callable[..., Platform], folder: Path, wait_until: Callable[..., Any]) -> Iterator[Platform]:
    sizes = ("--unified", "2", "--nodes", "2", "--threads", "1")
    variables = {"DIPTYCH_KV_CACHE_MIB": "8", "DIPTYCH_POLICY": "least_load"}
    running = start_shared(prefill=0, decode=0, options=("--model", str(folder), *sizes), **variables)
    wait_until(lambda: len(groups(running)) == 2, 200.0, "both groups are ready")
    yield running
    running.stop()  # before the next model has one


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """One process, one rank, another implementation."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        whole = model.generate(tokens, max_new_tokens=NUM_TOKENS, do_sample=False, attention_mask=tokens * 0 + 1)
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


def groups(platform: Platform) -> dict[int, Any]:
    ready = [each for each in platform.instances() if each.state == bootstrap_pb2.INSTANCE_STATE_READY]
    return {each.instance_id: each for each in ready if each.role == bootstrap_pb2.ROLE_UNIFIED}


@contextlib.contextmanager
def streams(platform: Platform, wait_until: Callable[..., Any]) -> Iterator[list[Future[list[int]]]]:
    """Have a stream under way for each prompt, at either group: tokens of all have come."""
    began: list[int] = []
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [
            pool.submit(greedy_stream, platform, prompt, NUM_TOKENS, lambda: began.append(1)) for prompt in PROMPTS
        ]
        wait_until(lambda: len(began) == len(PROMPTS), 200.0, "every stream has begun")
        yield answers


def node_of(platform: Platform, group: Any, node: int) -> psutil.Process:
    """The frontend of a node of a group."""
    leader = ["--leader", group.address]
    found = [each for each in platform.components("unified") if _has(each, leader, ["--node-rank", str(node)])]
    process: psutil.Process
    (process,) = found
    return process


def _has(process: psutil.Process, *wanted: list[str]) -> bool:
    words = process.cmdline()
    return all(any(words[at : at + len(each)] == each for at in range(len(words))) for each in wanted)


def test_a_group_is_one_member_with_the_epochs_of_its_nodes(platform: Platform) -> None:
    for group in groups(platform).values():
        assert [(node.node, node.first_rank, node.num_ranks) for node in group.nodes] == [(0, 0, 1), (1, 1, 1)]
        assert len({node.epoch for node in group.nodes}) == 2
        assert len(node_of(platform, group, 1).children()) == 1


def test_roles_of_groups_change_and_one_hands_over_to_the_other(
    platform: Platform, expected: list[list[int]], wait_until: Callable[..., Any]
) -> None:
    pair = list(groups(platform).values())
    for group, role in zip(pair, (Role.PREFILL, Role.DECODE), strict=True):
        set_role(platform, group, role)
    wait_until(platform.is_ready, 200.0, "the two are a pair")
    answer = platform.complete(PROMPTS[3], NUM_TOKENS, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected[3]
    flow = [answer["diptych"][f"{part}_instance"] for part in ("prefill", "decode")]
    assert flow == [f"{group.instance_id:016x}" for group in pair]
    for group in pair:
        set_role(platform, group, Role.UNIFIED)
    wait_until(lambda: len(groups(platform)) == 2, 200.0, "both do both again")


def test_a_rank_that_freezes_on_another_node_costs_no_request_and_its_group_goes_on_when_it_wakes(
    platform: Platform, expected: list[list[int]], wait_until: Callable[..., Any]
) -> None:
    before = groups(platform)
    victim = next(iter(before.values()))
    (rank,) = node_of(platform, victim, 1).children()
    # on a busy machine its node may be late to say so, and is blamed for that
    blamed = r"(a process of node 1 at 127.0.0.1 was stopped|node 1 at 127.0.0.1 is not heard)"
    silent = re.compile(f"the scheduler does not answer: {blamed}; its requests are done")
    with streams(platform, wait_until) as answers:
        rank.suspend()  # SIGSTOP
        try:
            assert [answer.result() for answer in answers] == expected
            # a peer may have heard nothing over its link before that is said
            wait_until(lambda: silent.search(platform.log.read_text()), 200.0, "its frontend says so")
        finally:
            rank.resume()
    wait_until(lambda: "the scheduler answers again" in platform.log.read_text(), 200.0, "it computes again")
    platform.assert_clean()
    wait_until(lambda: set(groups(platform)) == set(before), 200.0, "both groups are ready")


def test_a_lost_node_ends_its_group_and_streams_go_on_elsewhere(
    platform: Platform, expected: list[list[int]], wait_until: Callable[..., Any]
) -> None:
    before = groups(platform)
    victim = next(iter(before.values()))
    processes = [node_of(platform, victim, node) for node in (0, 1)]
    ranks = [rank for process in processes for rank in process.children()]
    with streams(platform, wait_until) as answers:
        processes[1].kill()
        wait_until(lambda: victim.instance_id not in groups(platform), 200.0, "the group is no member")
        assert [answer.result() for answer in answers] == expected
    wait_until(lambda: not any(rank.is_running() for rank in ranks), 200.0, "its ranks have ended")
    assert "a part of the group is gone: the connection to node 1" in platform.log.read_text()
    wait_until(lambda: len(groups(platform)) == 2, 200.0, "its nodes were started again, as another group")
    assert len(set(groups(platform)) - set(before)) == 1
    platform.assert_clean()


def test_a_group_is_rolled_out_beside_the_old_one_which_drains_and_takes_over_when_a_leader_is_killed(
    platform: Platform, expected: list[list[int]], wait_until: Callable[..., Any]
) -> None:
    """The last test: `diptych up` does not start again what was told to stop. The new group is cut otherwise."""
    leaving, staying = groups(platform).values()
    nodes = [node_of(platform, leaving, node) for node in (0, 1)]
    with another_group(platform, leaving, "--tp", "1", "--pp", "2", "--page-size", "8"):
        wait_until(lambda: len(groups(platform)) == 3, 200.0, "old and new serve beside each other")
        (new,) = set(groups(platform)) - {leaving.instance_id, staying.instance_id}
        with streams(platform, wait_until) as answers:
            nodes[1].terminate()
            assert [answer.result() for answer in answers] == expected
        wait_until(lambda: not any(map(is_running, nodes)), 200.0, "both nodes have ended")
        assert set(groups(platform)) == {staying.instance_id, new}
        assert platform.log.read_text().count("told to stop: so is the group") == 1
        leader, other = (node_of(platform, staying, node) for node in (0, 1))
        ranks = [rank for node in (leader, other) for rank in node.children()]
        with streams(platform, wait_until) as answers:
            leader.kill()
            wait_until(lambda: staying.instance_id not in groups(platform), 200.0, "the group is no member")
            assert [answer.result() for answer in answers] == expected
        wait_until(lambda: not any(map(is_running, [other, *ranks])), 200.0, "nothing of it goes on")
        assert greedy_stream(platform, PROMPTS[0], NUM_TOKENS) == expected[0]
        platform.assert_clean()


@contextlib.contextmanager
def another_group(platform: Platform, like: Any, *options: str) -> Iterator[None]:
    """Start the nodes of a group by the commands of one that runs, but for these options."""
    leader = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        for node in (0, 1):
            running = node_of(platform, like, node)
            command = [leader if word == like.address else word for word in running.cmdline()]
            variables = {**running.environ(), PARENT_PID_VARIABLE: str(os.getpid())}
            log = stack.enter_context(platform.log.with_name(f"node{node}").open("wb"))
            process = subprocess.Popen([*command, *options], env=variables, stdout=log, stderr=log)
            stack.callback(process.wait, 200)
            stack.callback(process.terminate)
        yield


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def set_role(platform: Platform, group: Any, role: Role) -> None:
    request = SetRoleRequest(instance_id=group.instance_id, role=role.wire, drain_ms=20_000)
    with open_sync_channel(group.address, platform.trust()) as channel:
        WorkerAdminStub(channel).SetRole(request, timeout=200)
