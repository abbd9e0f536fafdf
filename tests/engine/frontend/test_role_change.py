"""A worker's frontend that changes its role; its scheduler, routers and peers are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from tiny_config import tiny_config

from diptych.common.errors import Conflict, InvalidRequest, Unavailable
from diptych.common.members.roles import LegKind, Role
from diptych.common.refusals import Refusals
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import Trust
from diptych.engine.frontend import admin
from diptych.engine.frontend.admin import RoleChanges, role_route
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.scheduler_start import check_role
from diptych.engine.frontend.service import WorkerService
from diptych.engine.frontend.sessions import Sessions
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.v1 import admin_pb2, bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

TIMEOUT_S = 60.0
CONFIG = WorkerConfig(model="tiny")
PREFILL, DECODE, UNIFIED = Role.PREFILL.wire, Role.DECODE.wire, Role.UNIFIED.wire
READY, DRAINING = bootstrap_pb2.INSTANCE_STATE_READY, bootstrap_pb2.INSTANCE_STATE_DRAINING
STOP = inference_pb2.FINISH_REASON_STOP
HANDED_BACK = worker_pb2.ERROR_CODE_HANDED_BACK
PROMPTS = TokenizerManager(lambda: pytest.fail("there is no text"), num_threads=1, cache_bytes=0)


class PlayedScheduler:
    """Does at once what it is told. Legs run until they are handed back, or `finish` ends them."""

    def __init__(self) -> None:
        self.events_due: asyncio.Queue[engine_pb2.SchedulerEvents] = asyncio.Queue()
        self.rooms: list[int] = []
        self.served: list[int] = []

    def absence(self) -> str:
        return ""

    async def ready(self) -> engine_pb2.SchedulerReady:
        return engine_pb2.SchedulerReady(context_len=100, terms=bootstrap_pb2.Terms(weights="w"))

    async def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        while True:
            yield await self.events_due.get()

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        self.rooms.extend(leg.room for leg in commands.start)
        for room in (*commands.hand_back, *commands.abort):
            self.end(room, worker_pb2.LegOutput(room=room, error=worker_pb2.LegError(code=HANDED_BACK)))
        if commands.role:
            self.served.append(commands.role)
            self.events_due.put_nowait(engine_pb2.SchedulerEvents(context_len=50))
        if commands.status_query:
            status = worker_pb2.WorkerStatus(open_rooms=len(self.rooms))
            self.events_due.put_nowait(
                engine_pb2.SchedulerEvents(status=status, status_answers=[commands.status_query])
            )

    def end(self, room: int, output: worker_pb2.LegOutput) -> None:
        self.rooms.remove(room)
        self.events_due.put_nowait(engine_pb2.SchedulerEvents(outputs=[output]))

    def link(self, *peers: int) -> None:
        load = bootstrap_pb2.WorkerLoad(linked_instances=peers)
        self.events_due.put_nowait(engine_pb2.SchedulerEvents(load=load))


class Worker:
    """A prefill worker with one router, linked to decode worker 2."""

    def __init__(self) -> None:
        self.record = bootstrap_pb2.Instance(instance_id=1, role=PREFILL, state=bootstrap_pb2.INSTANCE_STATE_STARTING)
        self.members = {2: self.member(2, Role.DECODE)}
        self.scheduler = PlayedScheduler()
        self.sessions = Sessions(Role.PREFILL)
        scheduler = cast(Any, self.scheduler)
        self.group = WorkerGroup(scheduler, self.record, self.sessions, self._note, PROMPTS, 60.0, TIMEOUT_S)
        self.router = self.sessions.open()
        self.changes = RoleChanges(TIMEOUT_S, lambda role: check_role(tiny_config(), CONFIG, role))
        self.seen: list[tuple[int, bool, str]] = []  # role, paused, not_ready: as others are told
        self.on_members: list[Callable[[], None]] = []

    def member(self, instance_id: int, role: Role) -> bootstrap_pb2.Instance:
        terms = bootstrap_pb2.Terms(weights="w")
        return bootstrap_pb2.Instance(instance_id=instance_id, role=role.wire, state=READY, compat="c", terms=terms)

    def _note(self) -> None:
        news = (self.record.role, self.record.paused, self.record.not_ready)
        if not self.seen or news != self.seen[-1]:
            self.seen.append(news)

    def instances(self) -> dict[int, bootstrap_pb2.Instance]:
        return self.members

    def add_listener(self, listener: Callable[[], None]) -> None:
        self.on_members.append(listener)

    async def set_role(self, wire: int, drain_s: float | None = None) -> admin_pb2.SetRoleResponse:
        return await asyncio.wait_for(self.changes.set_role(self.group, wire, drain_s), 2 * TIMEOUT_S)

    def start(self, room: int, kind: LegKind = LegKind.PREFILL) -> None:
        (leg,) = self.sessions.start(self.router, [worker_pb2.StartLeg(room=room, kind=kind.wire)])
        self.scheduler.rooms.append(leg.room)

    async def outputs(self) -> list[tuple[int, int]]:
        batch = await asyncio.wait_for(self.router.next_batch(), TIMEOUT_S)
        return [(output.room, output.error.code) for output in batch.outputs]

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never happened")


def play(script: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        worker = Worker()
        await worker.group.load("any")
        works = (worker.group.relay(), worker.group.peers.follow(worker), worker.group.departure.draining.run())
        tasks = [asyncio.ensure_future(work) for work in works]
        worker.scheduler.link(2)
        await worker.until(lambda: worker.record.state == READY)
        worker.seen.clear()
        try:
            await script(worker)
        finally:
            for task in tasks:
                task.cancel()

    asyncio.run(run())


def test_who_stops_waiting_for_a_link_just_as_it_comes_up_waits_no_more() -> None:
    async def script(worker: Worker) -> None:
        worker.members[3] = worker.member(3, Role.PREFILL)
        changing = asyncio.ensure_future(worker.changes.set_role(worker.group, DECODE, None))
        await worker.until(lambda: worker.record.role == DECODE)
        worker.scheduler.link(2, 3)
        await worker.until(lambda: not worker.record.not_ready)
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing

    play(script)


def test_an_idle_worker_changes_its_role_and_tells_of_each_step() -> None:
    async def script(worker: Worker) -> None:
        worker.members[3] = worker.member(3, Role.PREFILL)
        changing = asyncio.ensure_future(worker.set_role(DECODE))
        await worker.until(lambda: worker.record.role == DECODE)
        worker.scheduler.link(2, 3)
        assert await changing == admin_pb2.SetRoleResponse(previous_role=PREFILL)
        why = "no prefill or unified worker is linked, since it serves decode"
        assert worker.seen == [(PREFILL, True, ""), (DECODE, False, why), (DECODE, False, "")]
        assert (worker.scheduler.served, worker.record.context_len) == ([DECODE], 50)
        assert worker.record.state == READY

    play(script)


def test_without_a_peer_of_the_new_role_the_answer_says_so_at_once() -> None:
    async def script(worker: Worker) -> None:
        answer = await worker.set_role(DECODE)
        assert answer.not_ready == "no prefill or unified worker is linked, since it serves decode"
        assert not worker.record.paused
        worker.members[3] = worker.member(3, Role.UNIFIED)
        worker.on_members[0]()
        worker.scheduler.link(2, 3)
        await worker.until(lambda: worker.record.not_ready == "")

    play(script)


def test_a_link_that_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LINK_WAIT_S", 0.01)

    async def script(worker: Worker) -> None:
        worker.members[3] = worker.member(3, Role.PREFILL)
        assert (await worker.set_role(DECODE)).not_ready.startswith("no prefill or unified worker is linked")

    play(script)


def test_a_unified_worker_needs_nobody_and_keeps_the_links_that_it_has() -> None:
    async def script(worker: Worker) -> None:
        assert (await worker.set_role(UNIFIED)).not_ready == ""
        del worker.members[2]
        worker.scheduler.link()
        await worker.set_role(DECODE)
        assert (await worker.set_role(UNIFIED)).not_ready == ""

    play(script)


def test_what_runs_is_finished_if_there_is_time() -> None:
    async def script(worker: Worker) -> None:
        worker.start(7)
        await worker.outputs()
        changing = asyncio.ensure_future(worker.set_role(UNIFIED))
        await worker.until(lambda: worker.record.paused)
        assert worker.sessions.start(worker.router, [worker_pb2.StartLeg(room=8)]) == []
        assert await worker.outputs() == [(8, HANDED_BACK)]
        assert worker.record.role == PREFILL
        worker.scheduler.end(7, worker_pb2.LegOutput(room=7, finish_reason=STOP))
        await changing
        assert await worker.outputs() == [(7, 0)]
        assert (worker.record.role, worker.record.paused) == (UNIFIED, False)

    play(script)


def test_what_has_not_finished_in_time_is_handed_back() -> None:
    async def script(worker: Worker) -> None:
        worker.start(7)
        await worker.outputs()
        await worker.set_role(UNIFIED, drain_s=0.0)
        assert await worker.outputs() == [(7, HANDED_BACK)]
        worker.start(8, LegKind.LOCAL)

    play(script)


def test_a_leg_of_the_former_role_is_handed_back_with_the_reason() -> None:
    async def script(worker: Worker) -> None:
        await worker.set_role(DECODE)
        late = worker_pb2.StartLeg(room=7, kind=LegKind.PREFILL.wire)
        assert worker.sessions.start(worker.router, [late]) == []
        (output,) = (await worker.router.next_batch()).outputs
        assert (output.error.code, output.error.message) == (HANDED_BACK, "serves decode, no prefill legs")

    play(script)


def test_the_same_role_again_changes_nothing() -> None:
    async def script(worker: Worker) -> None:
        assert await worker.set_role(PREFILL) == admin_pb2.SetRoleResponse(previous_role=PREFILL)
        assert (worker.seen, worker.scheduler.served) == ([], [])

    play(script)


def test_one_change_at_a_time() -> None:
    async def script(worker: Worker) -> None:
        worker.start(7)
        changing = asyncio.ensure_future(worker.set_role(UNIFIED))
        await worker.until(lambda: worker.record.paused)
        with pytest.raises(Unavailable, match="another change"):
            await worker.set_role(DECODE)
        worker.scheduler.end(7, worker_pb2.LegOutput(room=7, finish_reason=STOP))
        await changing

    play(script)


@pytest.mark.parametrize("wanted", [bootstrap_pb2.ROLE_ROUTER, bootstrap_pb2.ROLE_UNSPECIFIED, 99])
def test_what_is_no_workers_role_is_invalid(wanted: int) -> None:
    async def script(worker: Worker) -> None:
        with pytest.raises(InvalidRequest, match="one of prefill, decode, unified"):
            await worker.set_role(wanted)

    play(script)


def test_a_role_that_a_start_would_refuse_is_refused_in_the_same_words_and_nothing_changes() -> None:
    async def script(worker: Worker) -> None:
        worker.start(7)
        with pytest.raises(InvalidRequest, match="an encode worker needs a model that sees images"):
            await worker.set_role(Role.ENCODE.wire, 0.0)
        assert (worker.record.role, worker.record.paused, worker.scheduler.rooms) == (PREFILL, False, [7])

    play(script)


def test_a_worker_that_drains_keeps_its_role() -> None:
    async def script(worker: Worker) -> None:
        worker.start(7)
        changing = asyncio.ensure_future(worker.set_role(UNIFIED))
        await worker.until(lambda: worker.record.paused)
        worker.group.departure.draining.ask(TIMEOUT_S)
        worker.scheduler.end(7, worker_pb2.LegOutput(room=7, finish_reason=STOP))
        with pytest.raises(Conflict, match="begun to drain"):
            await changing
        with pytest.raises(Conflict, match="draining"):
            await worker.set_role(UNIFIED)
        assert (worker.record.role, worker.record.state) == (PREFILL, DRAINING)
        worker.scheduler.link(2, 3)
        await worker.until(lambda: len(worker.sessions.load.linked_instances) == 2)
        assert worker.record.state == DRAINING

    play(script)


def test_a_role_is_changed_and_told_over_http() -> None:
    async def script(worker: Worker) -> None:
        trust = Trust(Tokens.of_variable("0123456789abcdef"), None)
        app = Starlette(routes=[role_route(WorkerService([worker.group]), worker.changes, trust, Refusals())])
        headers = {"authorization": "Bearer 0123456789abcdef"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
            assert (await client.post("/role?role=unified")).status_code == 401
            answer = await client.post("/role?role=unified&drain_s=0", headers=headers)
            one = f"{1:016x}"
            changed = {"instance": one, "role": "unified", "previous_role": "prefill", "not_ready": ""}
            assert (answer.status_code, answer.json()) == (200, changed)
            assert (await client.get("/role", headers=headers)).json() == {one: "unified"}
            for query, status in (
                ("role=x", 400),
                ("role=encode", 400),
                ("role=decode&drain_s=x", 400),
                ("role=decode&instance=7", 404),
            ):
                assert (await client.post(f"/role?{query}", headers=headers)).status_code == status

    play(script)
