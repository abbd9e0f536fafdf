"""Legs whose prompt is text, before a scheduler that is played. Tokens are bytes; the tokenizer is ready when told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from diptych.common.errors import ConfigError
from diptych.engine.frontend.text_legs import TextLegs
from diptych.engine.frontend.tokenizer_manager import TokenizerManager
from diptych.generation.leg_prompt import prompt_of
from diptych.router.errors import ContextLengthExceeded
from diptych.router.values.request import TextPrompt
from diptych.router.values.validation import output_room
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1 import inference_pb2, worker_pb2
from diptych.v1.engine_pb2 import SchedulerCommands
from diptych.v1.worker_pb2 import LegError, LegOutput, LegStats, StartLeg

TIMEOUT_S = 60.0
CONTEXT_LEN = 20
BOS = 256


def byte_tokenizer() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return Tokenizer(backend, eos_ids=[BOS], chat_template=None)


class Worker:
    """Text legs between routers and a scheduler that only listens. `ready` lets the tokenizer be opened."""

    def __init__(self, *, has_tokenizer: bool = True) -> None:
        self.tokenizer = byte_tokenizer()
        self.has_tokenizer = has_tokenizer
        self.ready = threading.Event()
        self.threads = TokenizerManager(self._open, num_threads=1, cache_bytes=1000)
        self.now_s = 0.0
        self.legs = TextLegs(self, self.threads, self._answer, lambda: CONTEXT_LEN, lambda: self.now_s)
        self.heard: list[SchedulerCommands] = []
        self.answers: list[LegOutput] = []
        self._news = asyncio.Event()

    def _open(self) -> Tokenizer:
        assert self.ready.wait(TIMEOUT_S)
        if not self.has_tokenizer:
            raise ConfigError("there is no tokenizer.json")
        return self.tokenizer

    def _answer(self, outputs: Iterable[LegOutput]) -> None:
        self.answers += outputs
        self._news.set()

    async def send(self, commands: SchedulerCommands) -> None:
        self.heard.append(commands)
        self._news.set()

    async def start(self, *legs: StartLeg) -> None:
        await self.legs.send(SchedulerCommands(start=legs))
        self._news.clear()

    async def started(self) -> None:
        """Wait until the scheduler was told to start a leg."""
        while not self.rooms:
            self._news.clear()
            await self.news()

    async def news(self) -> None:
        """Wait for the next word of the tokenizer, which is ready from now on."""
        self.ready.set()
        await asyncio.wait_for(self._news.wait(), TIMEOUT_S)

    @property
    def rooms(self) -> list[int]:
        """What the scheduler was told to start."""
        return [leg.room for commands in self.heard for leg in commands.start]

    def errors(self) -> dict[int, LegError]:
        return {output.room: output.error for output in self.answers}


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.ready.set()
    worker.threads.close()


def text_leg(text: str, room: int = 1, timeout_ms: int = 0) -> StartLeg:
    return StartLeg(room=room, prompt_text=text, timeout_ms=timeout_ms)


def test_a_text_is_tokens_when_the_scheduler_sees_it_and_earlier_output_follows_it(worker: Worker) -> None:
    leg = StartLeg(room=1, prompt_text="hi<s>", add_special_tokens=True, prompt_token_ids=[7, 8])

    async def run() -> StartLeg:
        await worker.start(leg)
        await worker.news()
        return worker.heard[-1].start[0]

    heard = asyncio.run(run())
    assert prompt_of(heard).tolist() == [BOS, *worker.tokenizer.encode("hi"), BOS, 7, 8]
    assert worker.answers == []


def test_a_leg_with_tokens_does_not_wait_for_one_with_text(worker: Worker) -> None:
    async def run() -> list[list[int]]:
        await worker.start(text_leg("hi", room=1), StartLeg(room=2, prompt_token_ids=[3]))
        before = worker.rooms
        await worker.news()
        return [before, worker.rooms]

    assert asyncio.run(run()) == [[2], [2, 1]]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (SchedulerCommands(abort=[1]), worker_pb2.ERROR_CODE_ABORTED),
        (SchedulerCommands(hand_back=[1]), worker_pb2.ERROR_CODE_HANDED_BACK),
    ],
)
def test_a_leg_that_is_ended_while_it_waits_is_answered_and_never_starts(
    worker: Worker, end: SchedulerCommands, code: worker_pb2.ErrorCode
) -> None:
    async def run() -> None:
        await worker.start(text_leg("a", room=1), text_leg("b", room=2))
        await worker.legs.send(end)
        await worker.started()

    asyncio.run(run())
    assert worker.rooms == [2]
    assert [(output.room, output.error.code) for output in worker.answers] == [(1, code)]


@pytest.mark.parametrize(("waited_s", "left_ms"), [(0.4, 600), (1.0, None), (5.0, None)])
def test_the_time_in_a_queue_is_part_of_a_leg_s_time(worker: Worker, waited_s: float, left_ms: int | None) -> None:
    async def run() -> None:
        await worker.start(text_leg("a", timeout_ms=1000))
        await asyncio.sleep(0)  # its time has begun
        worker.now_s += waited_s
        await worker.news()

    asyncio.run(run())
    started = [leg.timeout_ms for commands in worker.heard for leg in commands.start]
    assert started == ([] if left_ms is None else [left_ms])
    assert [error.code for error in worker.errors().values()] == (
        [worker_pb2.ERROR_CODE_DEADLINE] if left_ms is None else []
    )


def test_a_text_that_leaves_no_room_for_output_is_refused_in_the_router_s_words(worker: Worker) -> None:
    async def run() -> None:
        await worker.start(text_leg("x" * CONTEXT_LEN))
        await worker.news()

    asyncio.run(run())
    with pytest.raises(ContextLengthExceeded) as refused:
        output_room(TextPrompt(""), CONTEXT_LEN, CONTEXT_LEN)
    assert worker.errors() == {1: LegError(code=worker_pb2.ERROR_CODE_TOO_LONG, message=str(refused.value))}


def test_a_worker_without_a_tokenizer_says_so() -> None:
    async def run() -> dict[int, LegError]:
        worker = Worker(has_tokenizer=False)
        await worker.start(text_leg("x"))
        await worker.news()
        worker.threads.close()
        return worker.errors()

    message = "there is no tokenizer.json"
    assert asyncio.run(run()) == {1: LegError(code=worker_pb2.ERROR_CODE_INTERNAL, message=message)}


def test_the_length_of_a_text_and_the_time_for_its_tokens_are_told_with_what_is_measured(worker: Worker) -> None:
    outputs = [LegOutput(room=room, stats=LegStats(cached_tokens=1)) for room in (1, 2)]
    last = LegOutput(room=1, finish_reason=inference_pb2.FINISH_REASON_STOP, stats=LegStats())
    late = LegOutput(room=1, stats=LegStats())

    async def run() -> None:
        await worker.start(text_leg("hello"), StartLeg(room=2, prompt_token_ids=[3]))
        worker.now_s += 0.25
        await worker.news()

    asyncio.run(run())
    for output in (*outputs, last, late):
        worker.legs.note([output])
    told = [(output.stats.prompt_tokens, output.stats.tokenize_us) for output in (*outputs, last, late)]
    assert told == [(5, 250_000), (0, 0), (5, 250_000), (0, 0)]


@pytest.mark.parametrize("num_ends", [1, 2])
def test_a_leg_that_is_ended_with_its_start_is_answered_once_and_nothing_is_held(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, num_ends: int
) -> None:
    monkeypatch.setattr("diptych.engine.frontend.text_legs.MAX_HELD_CHARS", 4)  # room for one

    async def run() -> None:
        for room in (1, 2):
            await worker.legs.send(SchedulerCommands(start=[text_leg("abcd", room)], abort=[room] * num_ends))
        await worker.start(text_leg("abcd", room=3))
        await worker.started()

    asyncio.run(run())
    assert worker.rooms == [3]
    aborted = LegError(code=worker_pb2.ERROR_CODE_ABORTED, message="aborted by the router")
    assert worker.answers == [LegOutput(room=room, error=aborted) for room in (1, 2)]


def test_a_text_that_is_far_too_long_is_refused_without_being_tokenised_to_its_end(worker: Worker) -> None:
    async def run() -> LegError:
        await worker.start(text_leg("x" * 2**22))
        await worker.news()
        return worker.errors()[1]

    error = asyncio.run(run())
    assert error.code == worker_pb2.ERROR_CODE_TOO_LONG
    assert error.message == f"the prompt has more than {CONTEXT_LEN} tokens, which is too many here: make it shorter"
