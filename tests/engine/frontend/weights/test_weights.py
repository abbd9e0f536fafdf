"""A worker's frontend whose weights are replaced in place; its scheduler is played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest

from diptych.common.errors import Conflict, DiptychError, InvalidRequest, Unavailable
from diptych.common.members.roles import Role
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.sessions import Sessions
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.engine.frontend.weights.weight_changes import go_on, pause, release, take_back, update_weights
from diptych.engine.frontend.weights.weight_requests import WeightRequests
from diptych.engine.frontend.weights.weight_routes import POSTS, VERSION
from diptych.v1 import admin_pb2, bootstrap_pb2, engine_pb2, worker_pb2
from diptych.v1.admin_pb2 import AdminAnswer, SwitchWeightsResult, UpdateWeightsRequest

PROMPTS = TokenizerManager(lambda: pytest.fail("there is no text"), num_threads=1, cache_bytes=0)


class PlayedScheduler:
    """Serves models by name. `broken` are those that break on their way; of others `lacking` is told."""

    def __init__(self) -> None:
        self.events_due: asyncio.Queue[engine_pb2.SchedulerEvents] = asyncio.Queue()
        self.served = "old"
        self.broken: set[str] = set()
        self.lacking: list[str] = []
        self.makes_vectors = False
        self.done: list[str] = []

    def absence(self) -> str:
        return ""

    async def ready(self) -> engine_pb2.SchedulerReady:
        return engine_pb2.SchedulerReady(context_len=100, terms=bootstrap_pb2.Terms(weights="w"))

    async def events(self) -> AsyncIterator[engine_pb2.SchedulerEvents]:
        while True:
            yield await self.events_due.get()

    async def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        events = engine_pb2.SchedulerEvents(admin_answers=[self._answer(each) for each in commands.admin])
        if commands.status_query:
            events.status.CopyFrom(worker_pb2.WorkerStatus())
            events.status_answers.append(commands.status_query)
        self.events_due.put_nowait(events)

    def _answer(self, command: admin_pb2.AdminCommand) -> AdminAnswer:
        kind = str(command.WhichOneof("command"))
        change = command.replace_weights
        self.done.append(f"{kind} {change.model or ' '.join(change.files)}".strip())
        if self.makes_vectors:
            return AdminAnswer(query=command.query, grpc_status="FAILED_PRECONDITION", message="it makes vectors")
        if kind == "close_weights":
            return AdminAnswer(query=command.query, switch_weights=SwitchWeightsResult(previous_model=self.served))
        if kind != "replace_weights":
            return AdminAnswer(query=command.query)
        if change.model in self.broken:
            return AdminAnswer(query=command.query, grpc_status="FAILED_PRECONDITION", message="rank 1: the file ends")
        result = SwitchWeightsResult(lacking=self.lacking)
        if not self.lacking and not change.more_comes:
            self.served = change.model
            terms = bootstrap_pb2.Terms(weights=f"content of {change.model}")
            result = SwitchWeightsResult(model_id=change.model, terms=terms, version=change.version)
        return AdminAnswer(query=command.query, switch_weights=result)


class Worker:
    """A group with that scheduler."""

    def __init__(self) -> None:
        self.record = bootstrap_pb2.Instance(instance_id=1, role=Role.PREFILL.wire)
        self.scheduler = PlayedScheduler()
        self.sessions = Sessions(Role.PREFILL)
        scheduler = cast(Any, self.scheduler)
        self.group = WorkerGroup(scheduler, self.record, self.sessions, lambda: None, PROMPTS, 60.0, 60.0)

    async def update(self, model: str = "", **fields: Any) -> admin_pb2.UpdateWeightsResponse:
        return await update_weights(self.group, UpdateWeightsRequest(model=model, in_place=True, **fields))

    @property
    def refuses_because(self) -> str:
        """Why it takes nothing new; its record must say that it does not."""
        assert self.record.paused is bool(self.sessions.closed_because)
        return self.sessions.closed_because


def play(script: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        worker = Worker()
        await worker.group.load("any")
        task = asyncio.ensure_future(worker.group.relay())
        try:
            await asyncio.wait_for(script(worker), 60)
        finally:
            task.cancel()

    asyncio.run(run())


def test_weights_that_fit_are_served_under_their_name_and_version() -> None:
    async def script(worker: Worker) -> None:
        assert worker.record.weights_version == "w"
        done = await worker.update("new", version="7")
        assert (done.model_id, worker.record.model_id, worker.record.weights_version) == ("new", "new", "7")
        assert worker.scheduler.done == ["check_weights", "close_weights", "replace_weights new"]
        assert worker.refuses_because == ""

    play(script)


def test_what_fails_on_its_way_is_followed_by_what_was_served() -> None:
    async def script(worker: Worker) -> None:
        worker.scheduler.broken = {"new"}
        with pytest.raises(InvalidRequest, match="rank 1: the file ends; old is served again"):
            await worker.update("new")
        assert (worker.scheduler.served, worker.refuses_because) == ("old", "")

    play(script)


def test_a_group_whose_weights_can_not_change_in_place_serves_on() -> None:
    async def script(worker: Worker) -> None:
        worker.scheduler.makes_vectors = True
        with pytest.raises(DiptychError, match="it makes vectors"):
            await worker.update("new")
        with pytest.raises(DiptychError, match="it makes vectors"):
            await release(worker.group, 0.0)
        assert worker.scheduler.done == ["check_weights", "close_weights"]
        assert (worker.refuses_because, dict(worker.group.departure.holds)) == ("", {})

    play(script)


def test_a_group_that_has_neither_old_nor_new_weights_says_so_until_others_come() -> None:
    async def script(worker: Worker) -> None:
        worker.scheduler.broken = {"new", "old"}
        with pytest.raises(Unavailable, match="the file ends; old can't be loaded again"):
            await worker.update("new")
        assert "neither the old ones nor the new ones" in worker.refuses_because
        with pytest.raises(Conflict, match="update them in place"):
            await update_weights(worker.group, UpdateWeightsRequest(model="third"))
        await pause(worker.group, 0.0)
        with pytest.raises(Conflict, match="neither the old"):
            await go_on(worker.group)
        assert "neither the old" in worker.refuses_because
        worker.scheduler.done.clear()
        await worker.update("third")
        assert worker.scheduler.done == ["check_weights", "replace_weights third"], "they are closed already"
        assert worker.refuses_because == ""

    play(script)


def test_tensors_that_are_lacking_keep_the_group_closed() -> None:
    async def script(worker: Worker) -> None:
        await worker.update(files=["/dev/shm/a"], more_comes=True)
        assert worker.refuses_because == "more of its weights is to come"
        worker.scheduler.lacking = ["model.norm.weight"]
        assert (await worker.update(files=["/dev/shm/b"])).lacking == ["model.norm.weight"]
        assert worker.refuses_because == "1 tensors are lacking, as model.norm.weight"
        worker.scheduler.lacking = []
        await worker.update(files=["/dev/shm/c"])
        assert worker.refuses_because == ""
        assert worker.scheduler.done.count("close_weights") == 1

    play(script)


def test_a_paused_group_stays_paused_through_an_update() -> None:
    async def script(worker: Worker) -> None:
        await pause(worker.group, 0.0)
        await worker.update("new")
        assert worker.refuses_because == "generation is paused: continue it"
        await go_on(worker.group)
        assert worker.refuses_because == ""

    play(script)


def test_released_weights_are_taken_back_from_where_they_came() -> None:
    async def script(worker: Worker) -> None:
        with pytest.raises(Conflict, match="nothing was released"):
            await take_back(worker.group)
        await release(worker.group, 0.0)
        assert worker.refuses_because == "the memory of its weights was released: resume it"
        await take_back(worker.group)
        assert worker.scheduler.done == ["close_weights", "release_weights", "replace_weights old"]
        assert (worker.refuses_because, worker.record.weights_version) == ("", "w")
        await worker.update(files=["/dev/shm/a"])
        await release(worker.group, 0.0)
        with pytest.raises(Conflict, match="came as tensors"):
            await take_back(worker.group)

    play(script)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "give one of a model, files"),
        ({"model": "a", "files": ["b"]}, "give one of a model, files"),
        ({"model": "a", "more_comes": True}, "a model is all there is"),
        ({"group": "trainer"}, "say which tensors"),
    ],
)
def test_requests_that_make_no_sense_change_nothing(fields: dict[str, Any], words: str) -> None:
    async def script(worker: Worker) -> None:
        with pytest.raises(InvalidRequest, match=words):
            await update_weights(worker.group, UpdateWeightsRequest(**fields))
        assert worker.scheduler.done == []

    play(script)


def test_every_path_is_answered_and_no_other() -> None:
    assert {*POSTS, VERSION} == WeightRequests(list, 0.0).handlers().keys()
