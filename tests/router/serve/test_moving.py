"""A request between two attempts: whoever gives the next token keeps it, in whatever order things are said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fast_loop import FastLoop

from diptych.common.members.roles import LegKind
from diptych.router.serve.attempt import Attempt, AttemptFailed
from diptych.router.serve.moving import PATIENCE_S, Move
from diptych.router.values.progress import WaitBudget
from diptych.router.workers.legs import Work
from diptych.v1 import inference_pb2, worker_pb2
from diptych.v1.worker_pb2 import LegError, LegOutput, StartLeg

OLD, NEW = 1, 2  # rooms
NUM_TOKENS = 30  # of the whole output: each is its own index
STOP = inference_pb2.FINISH_REASON_STOP
HANDED_BACK = worker_pb2.ERROR_CODE_HANDED_BACK
ABORTED = worker_pb2.ERROR_CODE_ABORTED


@dataclass
class Worker:
    """A session to a worker that says what it is told to say."""

    receivers: dict[int, Any] = field(default_factory=dict)
    started: dict[int, StartLeg] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)

    def start(self, kind: LegKind, leg: StartLeg, prompt: bytes, work: Work, receiver: Any) -> None:
        self.receivers[leg.room], self.started[leg.room] = (kind, receiver), leg

    def abort(self, room: int) -> None:
        self.aborted.add(room)

    def say(self, room: int, first_index: int = 0, tokens: Sequence[int] = (), **end: Any) -> None:
        kind, receiver = self.receivers[room]
        receiver.receive(kind, LegOutput(room=room, first_index=first_index, token_ids=tokens, **end))

    def fail(self, room: int, code: worker_pb2.ErrorCode) -> None:
        self.say(room, error=LegError(code=code, message="told to fail"))

    def die(self, room: int) -> None:
        kind, receiver = self.receivers[room]
        receiver.lose(kind, "it died")


class Story:
    """A request whose output is made by worker `old`, and asked to go on at worker `new`."""

    def __init__(self) -> None:
        self.old, self.new = Worker(), Worker()
        self._budget = WaitBudget(1e9, 600.0, 0.0)
        self._clock = asyncio.get_running_loop().time
        self.attempt = self._attempt(OLD, LegKind.LOCAL)
        self.tokens: list[int] = []  # what the client has
        self.unread: list[int] = []
        self.move: Move[Attempt] | None = None

    def _attempt(self, room: int, kind: LegKind) -> Attempt:
        legs = {kind: (cast(Any, self.old), StartLeg(room=room))}
        return Attempt(room, legs, b"", Work(1), self._budget, self._clock)

    def ask(self) -> None:
        asking = self._attempt(NEW, LegKind.PREFILL)

        def begin(unread: Sequence[int]) -> None:
            self.unread = [*self.tokens, *unread]
            asking.start_leg(LegKind.DECODE, cast(Any, self.new), StartLeg(room=NEW), b"", Work(1))

        self.move = Move(self.attempt, asking, begin)
        self.attempt.watch(self.move.look)
        asking.watch(self.move.look)
        asyncio.get_running_loop().call_later(PATIENCE_S, self.move.give_up)

    async def client(self) -> str:
        """Take tokens until the end; return how it came about."""
        while True:
            try:
                delta = await self.attempt.next()
            except AttemptFailed as failed:
                taken = self.move.pop() if self.move is not None else None
                if taken is None:
                    return failed.failure.code.name
                self.attempt, self.move = taken, None
                continue
            self.tokens += delta.token_ids
            if delta.finish is not None:
                return delta.finish.value


def run(story: Any) -> Any:
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        return runner.run(story)


async def told(*moves: Any) -> tuple[Story, str]:
    """Have the moves made one after the other, each when its consequences are known; return what came of it."""
    story = Story()
    client = asyncio.create_task(story.client())
    for move in moves:
        move(story)
        for _ in range(5):
            await asyncio.sleep(0)
    try:
        return story, await asyncio.wait_for(client, 3.0)
    except TimeoutError:
        return story, "waits"
    finally:
        story.attempt.close()
        if story.move is not None:
            story.move.cancel()


def stand_still(story: Story) -> None:
    story.old.say(NEW, 0, [4])


FIVE = (lambda story: story.old.say(OLD, 0, range(5)), Story.ask)
REST = range(5, 9)


def test_the_new_worker_goes_on_and_the_old_one_is_told_so() -> None:
    story, end = run(
        told(
            *FIVE,
            stand_still,
            lambda story: story.new.say(NEW, 1, REST),
            lambda story: story.old.fail(OLD, HANDED_BACK),
            lambda story: story.old.say(NEW, 1, finish_reason=STOP),
            lambda story: story.new.say(NEW, 5, [9], finish_reason=STOP),
        )
    )
    assert (story.tokens, end) == (list(range(10)), "stop")
    assert story.unread == list(range(5)), "the new leg is told what the client has, and what it has not read"
    assert story.old.aborted == {OLD}
    assert story.new.aborted == set()


def test_the_old_leg_may_end_before_the_new_one_speaks() -> None:
    story, end = run(
        told(
            *FIVE,
            stand_still,
            lambda story: story.old.fail(OLD, HANDED_BACK),
            lambda story: story.old.say(NEW, 1, finish_reason=STOP),
            lambda story: story.new.say(NEW, 1, REST, finish_reason=STOP),
        )
    )
    assert (story.tokens, end) == (list(range(9)), "stop")


def test_a_refusal_leaves_the_request_where_it_is() -> None:
    story, end = run(
        told(
            *FIVE,
            lambda story: story.old.fail(NEW, ABORTED),
            lambda story: story.old.say(OLD, 5, REST, finish_reason=STOP),
        )
    )
    assert (story.tokens, end) == (list(range(9)), "stop")
    assert story.new.started == {}


def test_a_new_worker_that_fails_leaves_the_request_where_it_is() -> None:
    story, end = run(
        told(
            *FIVE,
            stand_still,
            lambda story: story.new.fail(NEW, worker_pb2.ERROR_CODE_TRANSFER_FAILED),
            lambda story: story.old.say(OLD, 5, REST, finish_reason=STOP),
        )
    )
    assert (story.tokens, end) == (list(range(9)), "stop")
    assert story.old.aborted == {NEW}, "what stands still is told to run on"


def test_tokens_that_come_with_the_end_of_the_old_leg_are_not_made_again() -> None:
    story, end = run(
        told(
            *FIVE,
            stand_still,
            lambda story: story.old.say(OLD, 5, [5], error=LegError(code=HANDED_BACK, message="leaving")),
            lambda story: None,
        )
    )
    assert (story.tokens, end) == (list(range(6)), "HANDED_BACK"), "it is replayed behind them"
    assert NEW in story.new.aborted


def test_an_old_worker_that_goes_on_keeps_the_request_though_the_new_one_has_it_too() -> None:
    story, end = run(
        told(
            *FIVE,
            stand_still,
            lambda story: story.old.say(OLD, 5, [5]),
            lambda story: story.new.say(NEW, 1, [77]),
            lambda story: story.old.say(OLD, 6, [6], finish_reason=STOP),
        )
    )
    assert (story.tokens, end) == (list(range(7)), "stop")
    assert (story.old.aborted, story.new.aborted) == ({NEW}, {NEW})


def test_a_new_worker_that_was_first_keeps_the_request_though_the_old_one_goes_on() -> None:
    story, end = run(
        told(
            *FIVE,
            stand_still,
            lambda story: story.new.say(NEW, 1, [5]),
            lambda story: story.old.say(OLD, 5, [77]),
            lambda story: story.new.say(NEW, 2, [6], finish_reason=STOP),
        )
    )
    assert (story.tokens, end) == (list(range(7)), "stop")
    assert story.old.aborted == {OLD}


def test_a_new_worker_that_dies_after_the_old_one_let_go_has_the_request_tried_again() -> None:
    story, end = run(
        told(
            *FIVE,
            stand_still,
            lambda story: story.old.fail(OLD, HANDED_BACK),
            lambda story: story.new.die(NEW),
        )
    )
    assert (story.tokens, end) == (list(range(5)), "PEER_LOST")


def test_an_old_worker_that_dies_may_have_handed_it_over() -> None:
    def die(story: Story) -> None:
        story.old.die(OLD)
        if NEW not in story.old.aborted:
            story.old.die(NEW)

    story, end = run(told(*FIVE, stand_still, die))
    assert (story.tokens, end) == (list(range(5)), "PEER_LOST"), "the new leg fails with its sender, and it is replayed"
    story, end = run(told(*FIVE, die))
    assert (story.tokens, end) == (list(range(5)), "PEER_LOST")


@pytest.mark.parametrize("still", [False, True])
def test_a_move_that_takes_too_long_is_given_up(still: bool) -> None:
    async def late() -> tuple[Story, float]:
        story = Story()
        client = asyncio.create_task(story.client())
        story.old.say(OLD, 0, range(5))
        story.ask()
        if still:
            stand_still(story)
        await asyncio.sleep(PATIENCE_S + 0.1)
        story.old.say(OLD, 5, [5], finish_reason=STOP)
        await client
        return story, 0.0

    story, _ = run(late())
    assert story.tokens == list(range(6))
    assert NEW in story.old.aborted
    assert story.new.aborted == ({NEW} if still else set())


@pytest.mark.parametrize("lets_go", [False, True])
@pytest.mark.parametrize("pause_s", [0.1, PATIENCE_S + 0.5])
def test_a_client_that_reads_slowly_does_not_undo_a_move(pause_s: float, lets_go: bool) -> None:
    async def slow() -> tuple[Story, str]:
        story = Story()
        for move in (*FIVE, stand_still):
            move(story)
        if lets_go:
            story.old.fail(OLD, HANDED_BACK)
            story.old.say(NEW, 1, finish_reason=STOP)
        story.new.say(NEW, 1, REST)
        await asyncio.sleep(pause_s)
        story.new.say(NEW, 5, [9], finish_reason=STOP)
        return story, await asyncio.wait_for(story.client(), 3.0)

    story, end = run(slow())
    assert (story.tokens, end, story.new.aborted) == (list(range(10)), "stop", set())


class Drawn:
    """What two workers and the link between them do, drawn from a seed: always something that they may do."""

    def __init__(self, story: Story, rng: random.Random) -> None:
        self._story = story
        self._rng = rng
        self._made = {OLD: 2, NEW: 0}  # tokens, by room
        self._still_at: int | None = None
        self.old_runs = self.new_runs = True
        self._is_let_go = False

    def step(self) -> bool:
        """Do one thing; False when nobody does anything any more."""
        story = self._story
        if OLD in story.old.aborted:
            self.old_runs = False
        if NEW in story.new.aborted or NEW in story.old.aborted:
            self.new_runs = False
        choices = [self._old_makes] * (self.old_runs and (self._still_at is None or self._has_come_back))
        choices += [self._old_stands_still] * (self.old_runs and story.move is not None and self._still_at is None)
        if self._still_at is not None and NEW in story.new.started and self.new_runs:
            choices += [self._new_makes, self._new_makes]
            choices += [self._lets_go, self._loses_link] * (self.old_runs and not self._has_come_back)
        if not choices:
            return False
        self._rng.choice(choices)()
        return True

    _has_come_back = False

    def _end(self, count: int) -> dict[str, Any]:
        return {"finish_reason": STOP} if count == NUM_TOKENS else {}

    def _old_makes(self) -> None:
        self._made[OLD] += 1
        count = self._made[OLD]
        self._story.old.say(OLD, count - 1, [count - 1], **self._end(count))
        self.old_runs = count < NUM_TOKENS

    def _old_stands_still(self) -> None:
        self._still_at = self._made[NEW] = self._made[OLD]
        self._story.old.say(NEW, 0, [self._still_at - 1])

    def _new_makes(self) -> None:
        assert self._still_at is not None
        self._made[NEW] += 1
        count = self._made[NEW]
        self._story.new.say(NEW, count - self._still_at, [count - 1], **self._end(count))
        self.new_runs = count < NUM_TOKENS

    def _lets_go(self) -> None:
        self.old_runs = False
        self._story.old.fail(OLD, HANDED_BACK)
        self._story.old.say(NEW, 1, finish_reason=STOP)

    def _loses_link(self) -> None:
        """The new worker may have it all, and run."""
        self._has_come_back = True
        self._story.old.fail(NEW, worker_pb2.ERROR_CODE_PEER_LOST)
        if self._rng.random() < 0.5:
            self.new_runs = False


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_token_is_lost_or_given_twice_in_whatever_order_things_happen(first: int) -> None:
    async def play(seed: int) -> tuple[Story, str]:
        story, rng = Story(), random.Random(seed)
        client = asyncio.create_task(story.client())
        story.old.say(OLD, 0, [0, 1])
        await asyncio.sleep(0)
        drawn, asked_at = Drawn(story, rng), rng.randrange(NUM_TOKENS)
        while not client.done() and drawn.step():
            if len(story.tokens) >= asked_at and NEW not in story.old.started and drawn.old_runs:
                story.ask()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        end = await asyncio.wait_for(client, PATIENCE_S + 2.0) if drawn else ""
        story.attempt.close()
        return story, end

    ends = []
    for seed in range(first, first + 100):
        story, end = run(play(seed))
        assert story.tokens == list(range(len(story.tokens))), seed
        assert end == "stop", seed
        assert len(story.tokens) == NUM_TOKENS, seed
        ends.append(bool(story.new.started))
    assert 10 < sum(ends) < 100
