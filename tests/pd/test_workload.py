"""A random workload over a pair of workers, with a router that aborts the other leg of what fails."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from diptych.engine.limits import Scheduling
from diptych.engine.null_runner import expected_output
from diptych.engine.output import FailureCode

VOCAB = 1000
NUM_REQUESTS = 2000
EXPECTED = {FailureCode.ABORTED, FailureCode.DEADLINE, FailureCode.OVERLOADED, FailureCode.RETRACTED}

Pair = Any  # the fixture's class: test helpers can't be imported


@dataclass
class Play:
    """Feeds a pair a few requests and then a few moves at a time; time passes with the moves."""

    pair: Pair
    rng: random.Random
    asked: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    open_rooms: set[int] = field(default_factory=set)

    def run(self, num_requests: int) -> None:
        while len(self.asked) < num_requests:
            for _ in range(self.rng.randrange(6)):
                self.start(len(self.asked) + 1)
            for _ in range(self.rng.randrange(24)):
                self.move()
        while self.open_rooms:
            self.move()
        self.pair.run()

    def start(self, room: int) -> None:
        rng = self.rng
        prompt = [7] * rng.choice([0, 0, 8, 20]) + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))]
        self.asked[room] = (prompt, rng.choice([1, 2, 3, 5, 8, 30]))
        deadline_s = self.pair.now_s + rng.choice([0.2, 5.0]) if rng.random() < 0.1 else None
        fields = {"deadline_s": deadline_s, "priority": rng.randrange(-2, 3), "tenant": rng.choice("abc")}
        self.pair.start(room, *self.asked[room], **fields)
        self.open_rooms.add(room)
        if rng.random() < 0.1:
            self.abort(rng.choice(sorted(self.open_rooms)))

    def move(self) -> None:
        pair = self.pair
        pair.now_s += 0.002
        move = self.rng.choice([pair.deliver, pair.deliver, pair.step])
        move(self.rng.choice([pair.prefill, pair.decode]))
        for room in [room for room in self.open_rooms if self.pair.prefill.ended(room) or self.pair.decode.ended(room)]:
            self.settle(room)

    def settle(self, room: int) -> None:
        """What the router does with a leg that has ended."""
        ends = [side.ended(room) for side in (self.pair.prefill, self.pair.decode)]
        if any(end is not None and end.failure for end in ends):
            self.abort(room)
        if all(ends):
            self.open_rooms.discard(room)

    def abort(self, room: int) -> None:
        for side in (self.pair.prefill, self.pair.decode):
            if side.ended(room) is None:
                self.pair.abort(side, room)

    def verify(self) -> None:
        for room, (prompt, max_tokens) in self.asked.items():
            ends = [self.pair.prefill.ended(room), self.pair.decode.ended(room)]
            failures = {end.failure.code for end in ends if end.failure}
            assert failures <= EXPECTED
            tokens = self.pair.tokens(room)
            assert tokens == expected_output(prompt, len(tokens), VOCAB)
            if not failures:
                assert len(tokens) == max_tokens

    def story(self) -> list[Any]:
        return [(room, self.pair.prefill.outputs[room], self.pair.decode.outputs[room]) for room in self.asked]


def play(make_pair: type[Pair], overlap: bool, num_requests: int) -> list[Any]:
    scheduling = Scheduling("priority", max_waiting=100, tenant_weights={"a": 3.0})
    pair = make_pair(prefill_pages=40, decode_pages=40, scheduling=scheduling, overlap=overlap, check_every=200)
    game = Play(pair, random.Random(1))
    game.run(num_requests)
    pair.close()
    game.verify()
    pair.assert_clean()
    assert pair.decode.core.num_retracted > 0
    return game.story()


def test_thousands_of_requests_are_all_answered_and_the_same_seed_gives_the_same(make_pair: type[Pair]) -> None:
    assert play(make_pair, False, NUM_REQUESTS) == play(make_pair, False, NUM_REQUESTS)


def test_thousands_of_requests_are_all_answered_by_a_decode_worker_that_overlaps(make_pair: type[Pair]) -> None:
    play(make_pair, True, NUM_REQUESTS)


@pytest.mark.parametrize("prompt_len", [1, 4, 17])
def test_a_decode_worker_that_overlaps_gives_the_same_tokens(make_pair: type[Pair], prompt_len: int) -> None:
    pair = make_pair(overlap=True)
    prompts = {room: [room * 7 + i for i in range(prompt_len)] for room in range(1, 8)}
    for room, prompt in prompts.items():
        pair.start(room, prompt, max_tokens=3 * room)
    pair.run()
    pair.close()
    for room, prompt in prompts.items():
        assert pair.tokens(room) == expected_output(prompt, 3 * room, VOCAB)
    pair.assert_clean()
