"""What workers tell who watches them, from the step in the scheduler on: real processes, real UCX."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from diptych.common.net.rpc import open_sync_channel
from diptych.router.console.fleet.step_history import rows
from diptych.router.console.fleet.watches import Watches
from diptych.v1 import bootstrap_pb2
from diptych.v1.admin_pb2 import SetLogLevelRequest, SetLogLevelResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminStub
from diptych.v1.worker_pb2 import LINK_STATE_UP, WatchWorkerRequest, WorkerNews
from diptych.v1.worker_pb2_grpc import WorkerStub

Platform = Any  # the fixture's class: test helpers can't be imported
PREFILL, DECODE = bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_DECODE
PROMPT, NUM_TOKENS = list(range(1, 61)), 12


def worker_of(platform: Platform, role: bootstrap_pb2.Role) -> bootstrap_pb2.Instance:
    workers: list[bootstrap_pb2.Instance] = [each for each in platform.instances() if each.role == role]
    return workers[0]


class Watch:
    """One worker being watched, by a viewer."""

    def __init__(self, platform: Platform, role: bootstrap_pb2.Role) -> None:
        self.worker = worker_of(platform, role)
        self._channel = open_sync_channel(self.worker.address, platform.trust("viewer"))
        request = WatchWorkerRequest(instance_id=self.worker.instance_id)
        self._call = WorkerStub(self._channel).Watch(request, timeout=200)
        self.first: WorkerNews = next(self._call)

    def until(self, is_enough: Callable[[WorkerNews], bool]) -> WorkerNews:
        """Return all that is told up to then as one message."""
        told = WorkerNews()
        for news in self._call:
            told.status.CopyFrom(news.status)
            num_before = len(told.steps.duration_s)
            for mark in (*news.steps.handed, *news.steps.joined):
                mark.step += num_before
            told.steps.MergeFrom(news.steps)
            if is_enough(told):
                break
        return told

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()


@pytest.fixture
def watch(simulated: Platform) -> Iterator[Callable[[bootstrap_pb2.Role], Watch]]:
    watches: list[Watch] = []

    def start(role: bootstrap_pb2.Role) -> Watch:
        watches.append(Watch(simulated, role))
        return watches[-1]

    yield start
    for each in watches:
        each.close()


def test_the_first_word_is_the_whole_status(watch: Callable[..., Watch]) -> None:
    prefill, decode = watch(PREFILL), watch(DECODE)
    status = prefill.first.status
    assert prefill.first.has_links
    (link,) = status.links
    assert (link.peer_instance_id, link.state) == (decode.worker.instance_id, LINK_STATE_UP)
    assert status.instance.instance_id == prefill.worker.instance_id
    assert status.instance.transfer.layout.page_size > 0
    assert not status.instance.transfer.engine_metadata  # how to link is for peers only
    assert sum(status.pages_by_state[state] for state in ("free", "owned", "cached")) > 0
    assert (status.max_requests > 0, status.leaks_found, list(status.problems)) == (True, 0, [])


def test_a_request_is_handed_by_one_worker_and_joins_at_the_other(
    simulated: Platform, watch: Callable[..., Watch]
) -> None:
    prefill, decode = watch(PREFILL), watch(DECODE)
    simulated.complete(PROMPT, NUM_TOKENS, ignore_eos=True)
    handed = prefill.until(lambda told: bool(told.steps.handed))
    joined = decode.until(lambda told: len(told.steps.duration_s) >= NUM_TOKENS - 1)
    (out,), (into,) = handed.steps.handed, joined.steps.joined
    assert (out.room, into.step) == (into.room, 0)
    assert sum(handed.steps.prompt_tokens) == len(PROMPT)
    assert list(joined.steps.output_tokens) == [1] * (NUM_TOKENS - 1)
    assert set(joined.steps.requests) == {1}
    assert (sum(handed.steps.prompts), sum(handed.steps.prompt_pairs)) == (1, len(PROMPT) ** 2 / 2)
    assert list(joined.steps.context_tokens) == [len(PROMPT) + token for token in range(1, NUM_TOKENS)]
    assert list(joined.steps.prompts) == [0] * (NUM_TOKENS - 1)
    assert len(joined.steps.host_s) == NUM_TOKENS - 1
    assert (prefill.first.status.computing.device, decode.first.status.computing.tp) == ("sim", 1)
    last, first = rows(handed.steps, 0.0)[out.step], rows(joined.steps, 0.0)[0]
    assert last[5] == first[6] == [f"{out.room:016x}"]
    assert not handed.status.instance.HasField("transfer")


class Members:
    """Workers as a router's fleet has them, of which none comes or goes."""

    def __init__(self, workers: list[bootstrap_pb2.Instance]) -> None:
        known = [(each.instance_id, SimpleNamespace(record=each)) for each in workers]
        self._sessions = [SimpleNamespace(instance_id=key, is_open=True, worker=worker) for key, worker in known]

    def sessions(self) -> list[Any]:
        return self._sessions

    async def wait_for_change(self) -> None:
        await asyncio.Event().wait()


async def crossings(simulated: Platform, workers: list[bootstrap_pb2.Instance]) -> dict[str, tuple[set[str], set[str]]]:
    """Ask for an answer while a router watches; return by worker the rooms that were handed, and that joined."""
    watches = Watches(Members(workers), simulated.trust("router"))
    running = asyncio.create_task(watches.run())
    watches.start()
    while not all(watches.status(each.instance_id) for each in workers):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.02)
    await asyncio.to_thread(simulated.complete, PROMPT, NUM_TOKENS, ignore_eos=True)
    cursor, found = 0, {f"{each.instance_id:016x}": (set[str](), set[str]()) for each in workers}
    while not all(handed or joined for handed, joined in found.values()):
        cursor, told = watches.steps_since(cursor)
        for name, steps in told["workers"].items():
            for *_, handed, joined in steps:
                found[name][0].update(handed)
                found[name][1].update(joined)
        await asyncio.sleep(0.02)
    assert [len(watches.links(each.instance_id)) for each in workers] == [1, 1]
    running.cancel()
    await asyncio.wait([running])
    return found


def test_a_router_that_watches_sees_a_room_pass_from_one_worker_to_the_other(simulated: Platform) -> None:
    workers = [worker_of(simulated, PREFILL), worker_of(simulated, DECODE)]
    found = asyncio.run(asyncio.wait_for(crossings(simulated, workers), 200))
    (handed, into_prefill), (out_of_decode, joined) = found.values()
    assert (len(handed), handed) == (1, joined)
    assert (into_prefill, out_of_decode) == (set(), set())


def test_two_watchers_hear_of_the_same_steps(simulated: Platform, watch: Callable[..., Watch]) -> None:
    watches = [watch(DECODE), watch(DECODE)]
    simulated.complete(PROMPT, NUM_TOKENS, ignore_eos=True)
    told = [each.until(lambda told: len(told.steps.duration_s) >= NUM_TOKENS - 1) for each in watches]
    assert told[0].steps.joined == told[1].steps.joined
    assert list(told[0].steps.duration_s) == list(told[1].steps.duration_s)


def test_a_worker_is_no_watcher_and_an_instance_that_is_not_there_is_not_found(simulated: Platform) -> None:
    worker = worker_of(simulated, PREFILL)
    for party, instance_id, code in (
        ("worker", worker.instance_id, grpc.StatusCode.PERMISSION_DENIED),
        ("viewer", 12345, grpc.StatusCode.NOT_FOUND),
    ):
        with open_sync_channel(worker.address, simulated.trust(party)) as channel:
            with pytest.raises(grpc.RpcError) as error:
                next(WorkerStub(channel).Watch(WatchWorkerRequest(instance_id=instance_id), timeout=200))
            assert error.value.code() is code


def set_log_level(platform: Platform, level: str, party: str = "operator") -> SetLogLevelResponse:
    worker = worker_of(platform, PREFILL)
    request = SetLogLevelRequest(instance_id=worker.instance_id, level=level)
    with open_sync_channel(worker.address, platform.trust(party)) as channel:
        answer: SetLogLevelResponse = WorkerAdminStub(channel).SetLogLevel(request, timeout=200)
    return answer


def lines_of_starts(platform: Platform) -> list[str]:
    """What the prefill worker's scheduler logs of rooms that start: only at level debug."""
    return [line for line in platform.log.read_text().splitlines() if " starts: request " in line]


def test_an_operator_changes_the_log_level_of_a_running_scheduler(
    simulated: Platform, wait_for: Callable[..., Any]
) -> None:
    simulated.complete(PROMPT, 2)
    assert lines_of_starts(simulated) == []
    assert set_log_level(simulated, "debug").previous_level == "info"
    simulated.complete(PROMPT, 2)
    wait_for(lambda: lines_of_starts(simulated), 200.0, "the scheduler logs details")
    assert set_log_level(simulated, "warning").previous_level == "debug"
    num_before = len(lines_of_starts(simulated))
    simulated.complete(PROMPT, 2)
    assert len(lines_of_starts(simulated)) == num_before
    assert set_log_level(simulated, "info").previous_level == "warning"


@pytest.mark.parametrize(
    ("level", "party", "code", "words"),
    [
        ("loud", "operator", grpc.StatusCode.INVALID_ARGUMENT, "one of debug, info, warning, error, not 'loud'"),
        ("debug", "viewer", grpc.StatusCode.PERMISSION_DENIED, "it takes that of an operator"),
    ],
)
def test_a_level_that_is_none_or_a_caller_who_may_not_changes_nothing(
    simulated: Platform, level: str, party: str, code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as error:
        set_log_level(simulated, level, party)
    assert error.value.code() is code
    assert set_log_level(simulated, "info").previous_level == "info"
