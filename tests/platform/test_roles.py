"""Workers that do both, and workers that change their role under traffic: real processes, real UCX."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from diptych.common.members.roles import WORKER_ROLES, LegKind, Role
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.tokens import TOKEN_VARIABLE
from diptych.engine import Engine, SamplingParams
from diptych.v1 import bootstrap_pb2, worker_pb2
from diptych.v1.admin_pb2 import SetRoleRequest, SetRoleResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminStub

NUM_PROMPTS = 12
NUM_TOKENS = 24
NUM_CLIENTS = 4
Platform = Any  # the fixture's class: test helpers can't be imported


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(320), k=20 + 9 * number)


@pytest.fixture(scope="module")
def answers(tiny_folder: Path, reference: Callable[..., Engine]) -> dict[int, list[int]]:
    """What one process without any hand-off makes of each prompt."""
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    engine = reference(tiny_folder, device="sim", sim_timing=("none",))
    return {number: list(engine.generate(prompt(number), greedy).token_ids) for number in range(NUM_PROMPTS)}


@pytest.fixture(scope="module")
def start(
    platform_class: type[Platform], tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Platform]]:
    """`start(prefill, decode, unified)`, once for all tests of this file that want the same."""
    started: dict[tuple[int, ...], Platform] = {}

    def start(*counts: int) -> Platform:
        if counts not in started:
            prefill, decode, unified = counts
            options = ("--model", str(tiny_folder), "--unified", str(unified), "--device", "sim")
            log = tmp_path_factory.mktemp("roles") / "log"
            started[counts] = platform_class(log, prefill=prefill, decode=decode, options=options)
        return started[counts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_KV_CACHE_MIB", "4")
        patch.delenv(TOKEN_VARIABLE)  # `up` makes a token for each kind of member
        patch.setenv("DIPTYCH_POLICY", "least_load")  # every worker gets requests, whether it is worth it or not
        yield start
    for platform in started.values():
        platform.stop()


def ask(platform: Platform, number: int) -> Any:
    return platform.complete(prompt(number), NUM_TOKENS, ignore_eos=True, return_token_ids=True)


def ask_all(platform: Platform, answers: dict[int, list[int]]) -> list[Any]:
    """Ask everything at once, check each answer, return what the workers measured."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        given = list(pool.map(lambda number: ask(platform, number), answers))
    assert {number: answer["choices"][0]["token_ids"] for number, answer in enumerate(given)} == answers
    return [answer["diptych"] for answer in given]


def ready(platform: Platform) -> list[bootstrap_pb2.Instance]:
    workers = [each for each in platform.instances() if each.role in WORKER_ROLES]
    return [each for each in workers if each.state == bootstrap_pb2.INSTANCE_STATE_READY]


def pages(platform: Platform) -> dict[int, tuple[int, int]]:
    """Pages sent and received, by instance."""
    statuses: list[worker_pb2.WorkerStatus] = platform.statuses()
    return {each.instance.instance_id: (each.pages_sent, each.pages_received) for each in statuses}


def set_role(platform: Platform, worker: bootstrap_pb2.Instance, role: Role, drain_s: float = 20.0) -> float:
    """Return the seconds until the worker serves the role."""
    request = SetRoleRequest(instance_id=worker.instance_id, role=role.wire, drain_ms=round(drain_s * 1000))
    start_s = time.monotonic()
    with open_sync_channel(worker.address, platform.trust()) as channel:
        answer: SetRoleResponse = WorkerAdminStub(channel).SetRole(request, timeout=200)
    assert answer.not_ready == ""
    return time.monotonic() - start_s


def test_unified_workers_serve_each_other_and_each_alone(
    start: Callable[..., Platform], answers: dict[int, list[int]], wait_for: Callable[..., Any]
) -> None:
    platform = start(0, 0, 2)
    wait_for(lambda: all(len(each.instance.load.linked_instances) == 1 for each in platform.statuses()), 200.0, "links")
    first, second = sorted(f"{instance_id:016x}" for instance_id in pages(platform))
    together: list[Any] = []

    def flows() -> set[tuple[str, str]]:
        """How requests have gone, with some more: if they are slow to come, one by one, a few tell little."""
        together.extend(ask_all(platform, answers))
        return {(seen["prefill_instance"], seen["decode_instance"]) for seen in together}

    wait_for(lambda: {(first, second), (second, first)} <= flows(), 200.0, "each serves the other")
    assert flows() <= {(p, d) for p in (first, second) for d in (first, second)}
    moved = [seen for seen in together if seen["prefill_instance"] != seen["decode_instance"]]
    assert all(seen["whole"] and seen["prefill_kv_digest"] == seen["decode_kv_digest"] for seen in moved)
    assert all(seen["pages_moved"] + seen["decode_cached_tokens"] for seen in moved)
    platform.assert_clean()
    (sent, received), (other_sent, other_received) = pages(platform).values()
    assert (sent, received) == (other_received, other_sent)
    assert sent > 0
    assert received > 0

    platform.components("unified")[0].terminate()  # it drains, and stays away
    wait_for(lambda: len(ready(platform)) == 1, 200.0, "one is left")
    alone = ask_all(platform, answers)
    assert all(seen["prefill_instance"] == seen["decode_instance"] for seen in alone)
    assert {seen["pages_moved"] for seen in alone} == {0}
    platform.assert_clean()


class Traffic:
    """Clients that ask known prompts until the end of the block, and check every answer."""

    def __init__(self, platform: Platform, answers: dict[int, list[int]]) -> None:
        self._platform = platform
        self._answers = answers
        self._ended = threading.Event()
        self.num_right = 0
        self.wrong: list[Any] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_CLIENTS)]

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            number = (number + 1) % NUM_PROMPTS
            try:
                given = ask(self._platform, number)["choices"][0]["token_ids"]
            except (AssertionError, OSError) as error:
                self.wrong.append(error)
                continue
            if given == self._answers[number]:
                self.num_right += 1
            else:
                self.wrong.append((number, given))

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def four(start: Callable[..., Platform], wait_for: Callable[..., Any]) -> Iterator[Platform]:
    platform = start(2, 2, 0)
    wait_for(lambda: len(ready(platform)) == 4, 200.0, "every worker is ready, not only the first pair")
    processes = {process.pid for process in platform.tree()}
    yield platform
    assert {process.pid for process in platform.tree() if process.status() != psutil.STATUS_ZOMBIE} == processes
    platform.assert_clean()


def test_roles_change_under_traffic_and_nobody_notices(
    four: Platform, answers: dict[int, list[int]], wait_for: Callable[..., Any]
) -> None:
    worker = next(each for each in four.instances() if each.role == bootstrap_pb2.ROLE_PREFILL)
    roles = (Role.DECODE, Role.UNIFIED, Role.PREFILL)
    with Traffic(four, answers) as traffic:
        for role in roles:
            busy_s = set_role(four, worker, role)
            before, seen = pages(four)[worker.instance_id], traffic.num_right
            wait_for(lambda seen=seen: traffic.num_right > seen + 3 * NUM_CLIENTS or traffic.wrong, 200.0, "traffic")
            want = (before, (role.serves(LegKind.PREFILL), role.serves(LegKind.DECODE)))
            wait_for(lambda want=want: moved(four, worker, want[0]) == want[1], 60, f"pages as for {role.value}")
            print(f"{role.value}: {busy_s:.2f} s under traffic")
    assert traffic.wrong == []
    idle = {role.value: set_role(four, worker, role) for role in roles}
    print("idle:", ", ".join(f"{role} {seconds:.2f} s" for role, seconds in idle.items()))


def moved(platform: Platform, worker: bootstrap_pb2.Instance, before: tuple[int, int]) -> tuple[bool, bool]:
    """Whether it has sent pages that it computed, and received what others have, since `before`."""
    sent, received = pages(platform)[worker.instance_id]
    return sent > before[0], received > before[1]


def test_requests_that_do_not_end_in_time_go_on_elsewhere(four: Platform, wait_for: Callable[..., Any]) -> None:
    def one(_: int) -> Any:
        return four.complete(prompt(0), 300, ignore_eos=True, return_token_ids=True)["choices"]

    wanted, decode = one(0), bootstrap_pb2.ROLE_DECODE
    with ThreadPoolExecutor(16) as pool:
        running = pool.map(one, range(32))
        busy = wait_for(
            lambda: [s for s in four.statuses() if s.open_rooms and s.instance.role == decode], 200.0, "a leg"
        )
        set_role(four, busy[0].instance, Role.PREFILL, drain_s=0.0)
        assert list(running) == [wanted] * 32


def test_a_role_is_changed_by_command(four: Platform) -> None:
    worker = next(each for each in four.instances() if each.role in WORKER_ROLES)
    bootstrap = f"127.0.0.1:{four.bootstrap_port}"
    command = [sys.executable, "-m", "diptych.cli", "role", worker.address, "unified", "--bootstrap", bootstrap]
    command += ["--auth-token-file", str(four.token_file())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert re.fullmatch(r".* now serves unified, after [\d.]+ s\n", done.stdout), done.stdout
    (changed,) = [each for each in four.instances() if each.instance_id == worker.instance_id]
    assert changed.role == bootstrap_pb2.ROLE_UNIFIED


def test_each_member_has_a_token_of_its_own_which_is_not_enough_to_be_another(four: Platform) -> None:
    texts = {name: four.token_file(name).read_text() for name in ("worker", "router", "operator", "viewer")}
    secrets = {name: text.splitlines()[0].partition(":")[2] for name, text in texts.items()}
    _, *started = four.tree()
    shown = [str(process.environ()) + str(process.cmdline()) for process in started]
    assert not [each for each in shown for secret in secrets.values() if secret in each]
    assert {name for name in secrets if f"/{name}'" in str(shown)} == {"worker", "router"}

    worker = next(each for each in four.instances() if each.role in WORKER_ROLES)
    request = SetRoleRequest(instance_id=worker.instance_id, role=Role.DECODE.wire)
    for party in ("worker", "router", "viewer"):
        with open_sync_channel(worker.address, four.trust(party)) as channel, pytest.raises(grpc.RpcError) as caught:
            WorkerAdminStub(channel).SetRole(request, timeout=200)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    keys = [each.transfer.engine_metadata for each in four.instances()]
    assert (len(keys), set(keys)) == (5, {b""}), "link keys are for peers"
    assert {each.instance.transfer.engine_metadata for each in four.statuses()} == {b""}
