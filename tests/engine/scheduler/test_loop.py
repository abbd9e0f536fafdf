"""The loop between a command channel and a core, with a model that is a hash."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from emulated_queues import ArrayMovement, AtOnce
from null_runner import NullRunner, expected_output
from stepped_engine import local_core

from diptych.common.arrays import U64
from diptych.common.logging import set_level
from diptych.engine.cache.host_tier import HostTier, PageCopier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.lora.host import ReadAdapter
from diptych.engine.lora.registry import InvalidAdapter, LoraRegistry
from diptych.engine.runner.gpu.copy_queues import CopyQueues
from diptych.engine.runner.gpu.gpu_host_pages import GpuHostPages
from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.scheduler.adapters import Adapters
from diptych.engine.scheduler.admin_thread import AdminThread
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.scheduler.links.links import links_of_nobody
from diptych.engine.scheduler.loop import Parts, SchedulerLoop
from diptych.engine.scheduler.messages import outputs_said
from diptych.engine.scheduler.news import News
from diptych.engine.scheduler.stepping import StepGivenUp, StepWatch, SynchronousStepping
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.limits import PROMPT_ROWS, Limits, Scheduling
from diptych.grammars.compiler import Compiler
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1 import admin_pb2, bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

VOCAB, PAGE, CONTEXT = 1000, 4, 128
LONG_CONTEXT = 20_000  # seconds of steps: whatever a test does happens while such a request runs
ENDLESS = 1_000_000


class Slots:
    """Adapters without a model: a path is its weights and its fingerprint, unless there are none there."""

    def __init__(self) -> None:
        self.installed: dict[int, str] = {}
        self.dropped: list[str] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, path: Path) -> ReadAdapter[str]:
        assert self.may_read.wait(60)
        if path.name == "missing":
            raise InvalidAdapter(f"{path} is missing")
        if path.name == "bug":
            raise RuntimeError("a bug")
        return ReadAdapter(path.name, path.name)

    def install(self, slot: int, weights: str) -> None:
        assert slot not in self.installed
        self.installed[slot] = weights

    def remove(self, slot: int) -> None:
        del self.installed[slot]

    def drop(self, weights: str) -> None:
        assert weights not in self.installed.values()
        self.dropped.append(weights)


class StuckRunner(NullRunner):
    """While `stuck` is set, a step begins that never ends by itself; its layers are heard."""

    def __init__(self, kv: U64, watch: StepWatch) -> None:
        super().__init__(kv, VOCAB)
        self._watch = watch
        self.stuck = threading.Event()
        self.is_stuck = threading.Event()

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        listener = self._watch.listener()
        while self.stuck.is_set() or self.is_stuck.is_set():
            self.is_stuck.set()
            assert listener is not None
            time.sleep(0.001)
            try:
                listener(0)
            except StepGivenUp:
                self.is_stuck.clear()
                raise
        return super().execute(batch, sampling)


class Frontend:
    """The other end of the channel; the loop runs in a thread."""

    def __init__(self, tokenizer: Tokenizer, context_len: int = CONTEXT, num_host_slots: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket, channel = (self._context.socket(zmq.PAIR) for _ in range(2))
        self.socket.bind("inproc://loop")
        channel.connect("inproc://loop")
        num_pages = 2 * context_len // PAGE + 1
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        self._copier = late_copies(kv, num_host_slots)
        self.cache = cache = KvCache(
            num_pages=num_pages,
            page_size=PAGE,
            max_requests=8 + PROMPT_ROWS,
            max_tokens_per_request=context_len,
            tiers=[HostTier(num_host_slots, self._copier)] if num_host_slots else [],
        )
        turns = AdapterTurns(2)
        core = local_core(cache, Limits(context_len, VOCAB, frozenset(), 16, 8, Scheduling(max_waiting=4)), turns)
        watch = StepWatch()
        self.runner = StuckRunner(kv, watch)
        self._links = links_of_nobody()
        self._grammars = GrammarThread(lambda: Compiler(tokenizer, VOCAB, tokenizer.eos_ids))
        self.slots = Slots()
        adapters = Adapters(LoraRegistry(2, "base"), turns, self.slots)
        self._admin = AdminThread(adapters.handlers)
        stepping = SynchronousStepping(core, self.runner, time.monotonic)
        parts = Parts(self._links, self._grammars, self._admin, adapters, watch, self._copier)
        news = News(core, cache, self._links, adapters, stepping.meter)
        loop = SchedulerLoop(core, stepping, channel, parts, news)
        self.handlers = loop._handlers
        self._channel = channel
        self._thread = threading.Thread(target=loop.run)
        self._thread.start()

    def start(self, room: int, prompt: list[int], max_tokens: int, timeout_ms: int = 0, lora: str = "") -> None:
        sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, top_p=1, ignore_eos=True)
        leg = worker_pb2.StartLeg(
            room=room, prompt_token_ids=prompt, sampling=sampling, timeout_ms=timeout_ms, lora=lora
        )
        self.send(engine_pb2.SchedulerCommands(start=[leg]))

    def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        self.socket.send(commands.SerializeToString())

    def receive(self) -> engine_pb2.SchedulerEvents:
        assert self.socket.poll(200_000), "the loop says nothing"
        return engine_pb2.SchedulerEvents.FromString(self.socket.recv())

    def until_ended(self, room: int) -> list[worker_pb2.LegOutput]:
        outputs: list[worker_pb2.LegOutput] = []
        while not outputs or not (outputs[-1].finish_reason or outputs[-1].HasField("error")):
            outputs += [output for output in outputs_said(self.receive()) if output.room == room]
        return outputs

    def ask(self, **command: Any) -> engine_pb2.SchedulerEvents:
        """Send a command of an operator; return what came with the answer."""
        self.send(engine_pb2.SchedulerCommands(admin=[admin_pb2.AdminCommand(query=7, **command)]))
        while not (events := self.receive()).admin_answers:
            pass
        return events

    def load(self, name: str, path: str) -> engine_pb2.SchedulerEvents:
        return self.ask(load_lora=admin_pb2.LoadLoraRequest(name=name, path=path))

    def unload(self, name: str) -> engine_pb2.SchedulerEvents:
        return self.ask(unload_lora=admin_pb2.UnloadLoraRequest(name=name))

    def start_all(self, rooms: Iterable[int]) -> None:
        """Start them in one message, each one token long."""
        sampling = inference_pb2.SamplingParams(max_tokens=1, temperature=0, top_p=1, ignore_eos=True)
        legs = [worker_pb2.StartLeg(room=room, prompt_token_ids=[room], sampling=sampling) for room in rooms]
        self.send(engine_pb2.SchedulerCommands(start=legs))

    def until_all_ended(self, rooms: Iterable[int]) -> dict[int, worker_pb2.LegOutput]:
        ends: dict[int, worker_pb2.LegOutput] = {}
        while ends.keys() != set(rooms):
            ends |= {output.room: output for output in outputs_said(self.receive()) if ended(output)}
        return ends

    def close(self) -> None:
        self.send(engine_pb2.SchedulerCommands(shutdown=True))
        self._thread.join(60)
        assert not self._thread.is_alive()
        for part in (self._grammars, self._admin, self._links, self._copier):
            part.close()
        for socket in (self.socket, self._channel):
            socket.close(linger=0)
        self._context.term()


def late_copies(kv: U64, num_slots: int) -> PageCopier:
    """Return what copies as on a GPU, whose restores are heard of later; the device is a fast one."""
    queue = AtOnce()
    return GpuHostPages(ArrayMovement(kv, 8, num_slots), CopyQueues(queue, queue, queue, queue), num_slots, 8)


def ended(output: worker_pb2.LegOutput) -> bool:
    return bool(output.finish_reason) or output.HasField("error")


@pytest.fixture
def frontend(byte_tokenizer: Tokenizer) -> Iterator[Frontend]:
    frontend = Frontend(byte_tokenizer)
    yield frontend
    frontend.close()


@pytest.fixture
def long_frontend(byte_tokenizer: Tokenizer) -> Iterator[Frontend]:
    frontend = Frontend(byte_tokenizer, LONG_CONTEXT)
    yield frontend
    frontend.close()


def test_a_leg_is_answered_token_by_token(frontend: Frontend) -> None:
    frontend.start(7, [1, 2, 3], 5)
    outputs = frontend.until_ended(7)
    assert [output.first_index for output in outputs] == [0, 1, 2, 3, 4]
    assert [token for output in outputs for token in output.token_ids] == expected_output([1, 2, 3], 5, VOCAB)
    assert outputs[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH


def test_a_prefix_that_comes_back_from_host_memory_wakes_the_loop(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would: the loop has nothing to compute meanwhile, and here it does not look by itself."""
    monkeypatch.setattr("diptych.engine.scheduler.loop.IDLE_S", 60.0)
    frontend = Frontend(byte_tokenizer, num_host_slots=100)
    prompts = [[first] * 120 for first in range(4)]
    for room in range(1, 13):
        prompt = prompts[room % 4]
        frontend.start(room, prompt, 3)
        tokens = [token for output in frontend.until_ended(room) for token in output.token_ids]
        assert tokens == expected_output(prompt, 3, VOCAB)
    frontend.close()
    assert frontend.cache.moves.num_restored > 4 * 28


def test_output_is_cut_to_what_the_context_leaves(frontend: Frontend) -> None:
    frontend.start(7, list(range(CONTEXT - 3)), ENDLESS)
    outputs = frontend.until_ended(7)
    assert sum(len(output.token_ids) for output in outputs) == 3


def test_an_abort_reaches_a_running_leg(frontend: Frontend) -> None:
    frontend.start(7, [1], 100)
    frontend.receive()
    frontend.send(engine_pb2.SchedulerCommands(abort=[7]))
    last = frontend.until_ended(7)[-1]
    assert last.error.code == worker_pb2.ERROR_CODE_ABORTED or last.finish_reason


def test_an_abort_reaches_a_leg_in_the_middle_of_a_step(frontend: Frontend) -> None:
    frontend.runner.stuck.set()
    frontend.start(7, [1], 100)
    assert frontend.runner.is_stuck.wait(60)
    frontend.runner.stuck.clear()  # only this step
    frontend.start(8, [2], 1)
    frontend.send(engine_pb2.SchedulerCommands(abort=[9]))  # somebody else's
    frontend.send(engine_pb2.SchedulerCommands(abort=[7]))
    ends = frontend.until_all_ended([7, 8])
    assert ends[7].error.code == worker_pb2.ERROR_CODE_ABORTED
    assert list(ends[8].token_ids) == expected_output([2], 1, VOCAB)


def test_a_timeout_counts_from_receipt(frontend: Frontend) -> None:
    frontend.start(8, [5] * 100, 20)
    frontend.start(7, [1], ENDLESS, timeout_ms=1)
    last = frontend.until_ended(7)[-1]
    assert last.error.code == worker_pb2.ERROR_CODE_DEADLINE or last.finish_reason


def test_what_is_beyond_the_longest_queue_is_turned_away(frontend: Frontend) -> None:
    frontend.start_all(range(1, 15))
    ends = {room: output for room, output in frontend.until_all_ended(range(1, 15)).items() if output.HasField("error")}
    assert {output.error.code for output in ends.values()} == {worker_pb2.ERROR_CODE_OVERLOADED}
    assert set(ends) == {13, 14}  # behind 8 that have places, and 4 that wait


def test_a_loop_that_is_watched_tells_its_steps_and_who_ran_in_them(frontend: Frontend) -> None:
    frontend.send(engine_pb2.SchedulerCommands(watch_s=60.0, watcher_came=True))
    frontend.start(7, [1, 2, 3], 5)
    steps = worker_pb2.StepRecords()
    while len(steps.duration_s) < 5:  # all five tokens: the first step computes the prompt, too
        steps.MergeFrom(frontend.receive().news.steps)
    assert (list(steps.prompt_tokens), list(steps.output_tokens)) == ([3, 0, 0, 0, 0], [0, 1, 1, 1, 1])
    assert list(steps.requests) == [1] * 5
    assert (list(steps.handed), list(steps.joined)) == ([], [])  # it was served alone


def test_a_loop_that_idles_tells_its_last_steps_soon(frontend: Frontend) -> None:
    frontend.send(engine_pb2.SchedulerCommands(watch_s=60.0, watcher_came=True))
    while not (first := frontend.receive()).HasField("news"):
        pass
    assert (first.news.has_links, first.news.status.open_rooms) == (True, 0)
    assert frontend.receive().HasField("news")  # nothing else happens


def test_a_watch_that_is_not_renewed_ends(frontend: Frontend) -> None:
    frontend.send(engine_pb2.SchedulerCommands(watch_s=1e-3, watcher_came=True))
    while not frontend.receive().HasField("news"):
        pass
    frontend.start(7, [1, 2, 3], 50)
    told: list[engine_pb2.SchedulerEvents] = []
    while not told or not (told[-1].outputs and ended(told[-1].outputs[-1])):
        told.append(frontend.receive())
    assert not any(events.HasField("news") for events in told)


def test_the_log_level_changes_between_two_steps(frontend: Frontend, caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogger().level
    try:
        frontend.send(engine_pb2.SchedulerCommands(log_level="debug"))
        frontend.start(7, [1], 1)
        frontend.until_ended(7)
        assert "room 0000000000000007 starts: request " in caplog.messages
        frontend.send(engine_pb2.SchedulerCommands(log_level="error"))
        frontend.start(8, [1], 1)
        frontend.until_ended(8)
        assert not [message for message in caplog.messages if "0000000000000008" in message]
    finally:
        set_level(logging.getLevelName(before).lower())


def test_status_is_answered_and_clean(frontend: Frontend) -> None:
    frontend.start(7, [1, 2, 3], 5)
    frontend.until_ended(7)
    frontend.send(engine_pb2.SchedulerCommands(status_query=42))
    while list((events := frontend.receive()).status_answers) != [42]:
        pass
    assert events.status.open_rooms == 0
    assert list(events.status.problems) == []
    assert events.status.pages_by_state["owned"] == 0


def test_every_one_of_several_status_queries_is_answered(frontend: Frontend) -> None:
    for query in range(1, 6):
        frontend.send(engine_pb2.SchedulerCommands(status_query=query))
    answered: list[int] = []
    while len(answered) < 5:
        answered += frontend.receive().status_answers
    assert sorted(answered) == [1, 2, 3, 4, 5]


def test_load_is_told_when_it_changed(frontend: Frontend) -> None:
    first = frontend.receive()
    assert first.load.total_pages == 64
    frontend.start(7, [1, 2, 3], 5)
    loads: list[bootstrap_pb2.WorkerLoad] = []
    while not loads or loads[-1].num_running:
        events = frontend.receive()
        if events.HasField("load"):
            loads.append(events.load)
    assert any(load.num_running == 1 for load in loads)


def adapters(events: engine_pb2.SchedulerEvents) -> dict[str, str]:
    return {adapter.name: adapter.fingerprint for adapter in events.loras.adapters}


def test_an_adapter_is_loaded_used_and_unloaded_while_others_run(frontend: Frontend) -> None:
    frontend.start(1, [1], 100)
    loaded = frontend.load("a", "weights")
    expected = bootstrap_pb2.LoraAdapter(name="a", fingerprint="weights")
    assert loaded.admin_answers[0].load_lora == admin_pb2.LoadLoraResponse(adapter=expected, was_loaded=False)
    assert adapters(loaded) == {"a": "weights"}
    assert frontend.slots.installed == {0: "weights"}
    frontend.start(2, [1, 2, 3], 5, lora="a")
    assert frontend.until_ended(2)[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    unloaded = frontend.unload("a")
    assert unloaded.admin_answers[0].HasField("unload_lora")
    assert unloaded.HasField("loras")
    assert adapters(unloaded) == {}
    assert frontend.slots.installed == {}


def test_a_loop_with_nothing_to_do_wakes_up_for_what_was_read(frontend: Frontend) -> None:
    frontend.receive()
    frontend.slots.may_read.clear()
    command = admin_pb2.AdminCommand(query=1, load_lora=admin_pb2.LoadLoraRequest(name="a", path="x"))
    frontend.send(engine_pb2.SchedulerCommands(admin=[command], status_query=1))
    while not frontend.receive().status_answers:  # it has taken the command, and sleeps
        pass
    frontend.slots.may_read.set()
    assert adapters(frontend.receive()) == {"a": "x"}


def test_while_an_adapter_is_read_the_loop_goes_on(frontend: Frontend) -> None:
    frontend.slots.may_read.clear()
    command = admin_pb2.AdminCommand(query=1, load_lora=admin_pb2.LoadLoraRequest(name="a", path="x"))
    frontend.send(engine_pb2.SchedulerCommands(admin=[command]))
    frontend.start(1, [1, 2, 3], 5)
    assert frontend.until_ended(1)[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert frontend.slots.installed == {}
    frontend.slots.may_read.set()
    assert adapters(frontend.receive()) == {"a": "x"}


def test_an_unloading_adapter_stays_for_the_request_that_runs_with_it(long_frontend: Frontend) -> None:
    frontend = long_frontend
    frontend.load("a", "old")
    frontend.start(1, [1], ENDLESS, lora="a")
    while not list(outputs_said(frontend.receive())):
        pass
    assert adapters(frontend.unload("a")) == {}
    frontend.start(2, [1], 5, lora="a")
    assert frontend.until_ended(2)[-1].error.message == "no adapter 'a' is loaded here"
    assert adapters(frontend.load("a", "new")) == {"a": "new"}
    assert frontend.slots.installed == {0: "old", 1: "new"}
    frontend.send(engine_pb2.SchedulerCommands(abort=[1]))
    frontend.until_ended(1)
    assert frontend.slots.installed == {1: "new"}


@pytest.mark.parametrize(
    ("path", "status", "words"), [("missing", "INVALID_ARGUMENT", "missing is missing"), ("bug", "INTERNAL", "a bug")]
)
def test_what_cannot_be_loaded_is_answered_and_leaves_its_place_free(
    frontend: Frontend, path: str, status: str, words: str
) -> None:
    for _ in range(3):
        (answer,) = frontend.load("a", path).admin_answers
        assert answer.grpc_status == status
        assert words in answer.message
    assert adapters(frontend.load("a", "x")) == {"a": "x"}


def test_an_unknown_adapter_cannot_be_unloaded(frontend: Frontend) -> None:
    (answer,) = frontend.unload("a").admin_answers
    assert (answer.grpc_status, answer.message) == ("NOT_FOUND", "no adapter 'a' is loaded")


def test_an_adapter_has_a_cache_of_its_own_and_a_reloaded_one_another(frontend: Frontend) -> None:
    """`cached_tokens` of a prompt of 10 tokens, pages of 4."""

    def cached(room: int, lora: str) -> int:
        frontend.start(room, list(range(10)), 1, lora=lora)
        return frontend.until_ended(room)[-1].stats.cached_tokens

    frontend.load("a", "old")
    frontend.load("b", "other")
    assert [cached(1, ""), cached(2, ""), cached(3, "a"), cached(4, "b"), cached(5, "a")] == [0, 8, 0, 0, 8]
    frontend.unload("a")
    frontend.load("a", "new")
    assert [cached(6, "a"), cached(7, "a")] == [0, 8]
    frontend.unload("b")
    frontend.load("b", "old")
    assert cached(8, "b") == 8  # the same weights under another name


def test_each_field_of_a_command_has_who_hears_of_it(frontend: Frontend) -> None:
    assert set(frontend.handlers) == set(engine_pb2.SchedulerCommands.DESCRIPTOR.fields_by_name)
