"""The loop between a command channel and a core, with a model that is a hash."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from diptych.engine.aggregated import AggregatedCore
from diptych.engine.grammar.compiler import Compiler
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.null_runner import NullRunner, expected_output
from diptych.engine.runtime.grammar_thread import GrammarThread
from diptych.engine.runtime.links import NoLinks
from diptych.engine.runtime.loop import SchedulerLoop
from diptych.v1 import bootstrap_pb2, engine_pb2, inference_pb2, worker_pb2

VOCAB, PAGE, CONTEXT = 1000, 4, 128
ENDLESS = 1_000_000


class Frontend:
    """The other end of the channel; the loop runs in a thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket, channel = (self._context.socket(zmq.PAIR) for _ in range(2))
        self.socket.bind("inproc://loop")
        channel.connect("inproc://loop")
        cache = KvCache(num_pages=65, page_size=PAGE, max_requests=8, max_tokens_per_request=CONTEXT)
        core = AggregatedCore(cache, Limits(CONTEXT, VOCAB, frozenset(), 16, 8))
        runner = NullRunner(np.zeros((65, PAGE), dtype=np.uint64), VOCAB)
        self._grammars = GrammarThread(lambda: Compiler(tokenizer, VOCAB, tokenizer.eos_ids))
        loop = SchedulerLoop(core, runner, channel, NoLinks(), self._grammars, cache=cache, max_tokens=CONTEXT)
        self._channel = channel
        self._thread = threading.Thread(target=loop.run)
        self._thread.start()

    def start(self, room: int, prompt: list[int], max_tokens: int, timeout_ms: int = 0) -> None:
        sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, top_p=1, ignore_eos=True)
        leg = worker_pb2.StartLeg(room=room, prompt_token_ids=prompt, sampling=sampling, timeout_ms=timeout_ms)
        self.send(engine_pb2.SchedulerCommands(start=[leg]))

    def send(self, commands: engine_pb2.SchedulerCommands) -> None:
        self.socket.send(commands.SerializeToString())

    def receive(self) -> engine_pb2.SchedulerEvents:
        assert self.socket.poll(10_000), "the loop says nothing"
        return engine_pb2.SchedulerEvents.FromString(self.socket.recv())

    def until_ended(self, room: int) -> list[worker_pb2.LegOutput]:
        outputs: list[worker_pb2.LegOutput] = []
        while not outputs or not (outputs[-1].finish_reason or outputs[-1].HasField("error")):
            outputs += [output for output in self.receive().outputs if output.room == room]
        return outputs

    def close(self) -> None:
        self.send(engine_pb2.SchedulerCommands(shutdown=True))
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._grammars.close()
        for socket in (self.socket, self._channel):
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def frontend(byte_tokenizer: Tokenizer) -> Iterator[Frontend]:
    frontend = Frontend(byte_tokenizer)
    yield frontend
    frontend.close()


def test_a_leg_is_answered_token_by_token(frontend: Frontend) -> None:
    frontend.start(7, [1, 2, 3], 5)
    outputs = frontend.until_ended(7)
    assert [output.first_index for output in outputs] == [0, 1, 2, 3, 4]
    assert [token for output in outputs for token in output.token_ids] == expected_output([1, 2, 3], 5, VOCAB)
    assert outputs[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH


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


def test_a_timeout_counts_from_receipt(frontend: Frontend) -> None:
    frontend.start(8, [5] * 100, 20)
    frontend.start(7, [1], ENDLESS, timeout_ms=1)
    last = frontend.until_ended(7)[-1]
    assert last.error.code == worker_pb2.ERROR_CODE_DEADLINE or last.finish_reason


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
