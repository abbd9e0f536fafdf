"""A random workload over a pair of workers, with a router that aborts the other leg of what fails."""

from __future__ import annotations

import os
import random
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner, entries, expected_output, next_token

from diptych.engine.lora.registry import NO_ADAPTER
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.limits import Scheduling
from diptych.engine.values.prompt_cost import PromptCost
from diptych.generation.output import FailureCode
from diptych.generation.page_hash import extra_key

VOCAB = 1000
PAGE = 4
IS_DEEP = bool(os.environ.get("DIPTYCH_DEEP_CHECKS"))
NUM_REQUESTS = 2000 if IS_DEEP else 700
NUM_EQUAL = 100_000 if IS_DEEP else 800  # in each of two plays
SEED = secrets.randbits(32) if IS_DEEP else 1
EXPECTED = {FailureCode.ABORTED, FailureCode.DEADLINE, FailureCode.OVERLOADED, FailureCode.RETRACTED}

Pair = Any  # the fixture's class: test helpers can't be imported


@dataclass
class Play:
    """Feeds a pair a few requests and then a few moves at a time; time passes with the moves."""

    pair: Pair
    rng: random.Random
    asked: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    open_rooms: set[int] = field(default_factory=set)
    most_open: int = 1000

    def run(self, num_requests: int) -> None:
        while len(self.asked) < num_requests:
            for _ in range(self.rng.randrange(6)):
                self.start(len(self.asked) + 1)
            for _ in range(self.rng.randrange(24)):
                self.move()
            while len(self.open_rooms) > self.most_open:
                self.move()
        while self.open_rooms:
            self.move()
        self.pair.run()

    def start(self, room: int) -> None:
        rng = self.rng
        self.asked[room] = (self.prompt(), rng.choice([1, 2, 3, 5, 8, 30]))
        deadline_s = self.pair.now_s + rng.choice([0.2, 5.0]) if rng.random() < 0.1 else None
        fields = {"deadline_s": deadline_s, "priority": rng.randrange(-2, 3), "tenant": rng.choice("abc")}
        fields |= self.namespace(room)
        self.pair.start(room, *self.asked[room], **fields)
        self.open_rooms.add(room)
        if rng.random() < 0.1:
            self.abort(rng.choice(sorted(self.open_rooms)))

    def prompt(self) -> list[int]:
        rng = self.rng
        return [7] * rng.choice([0, 0, 8, 20]) + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))]

    def namespace(self, room: int) -> dict[str, Any]:
        return {}

    def right(self, room: int, num_tokens: int) -> list[int]:
        """What a request's first tokens must be."""
        return expected_output(self.asked[room][0], num_tokens, VOCAB)

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
        for room, (_, max_tokens) in self.asked.items():
            ends = [self.pair.prefill.ended(room), self.pair.decode.ended(room)]
            failures = {end.failure.code for end in ends if end.failure}
            assert failures <= EXPECTED
            tokens = self.pair.tokens(room)
            assert tokens == self.right(room, len(tokens))
            if not failures:
                assert len(tokens) == max_tokens

    def story(self) -> list[Any]:
        return [(room, self.pair.prefill.outputs[room], self.pair.decode.outputs[room]) for room in self.asked]


@dataclass
class EqualPrompts(Play):
    """Nearly all begin as others do that came just before. Each adapter makes KV of its own of the same tokens."""

    in_fashion: list[list[int]] = field(default_factory=list)
    adapters: dict[int, int] = field(default_factory=dict)

    def prompt(self) -> list[int]:
        rng = self.rng
        if len(self.in_fashion) < 3 or rng.random() < 0.02:
            self.in_fashion.append([rng.randrange(VOCAB) for _ in range(rng.randrange(20, 61))])
        common = rng.choice(self.in_fashion[-3:])
        cut = len(common) if rng.random() < 0.7 else rng.randrange(1, len(common))
        return common[:cut] + [rng.randrange(2) for _ in range(rng.choice([0, 0, 0, 1, 5]))]

    def namespace(self, room: int) -> dict[str, Any]:
        adapter = self.adapters[room] = self.rng.choice([NO_ADAPTER, NO_ADAPTER, NO_ADAPTER, 0, 1])
        return {"adapter": adapter, "extra_key": extra_key(b"", "" if adapter == NO_ADAPTER else f"adapter-{adapter}")}

    def right(self, room: int, num_tokens: int) -> list[int]:
        tokens = list(self.asked[room][0])
        for _ in range(num_tokens):
            array = np.array(tokens, dtype=np.int64)
            kv = entries(array, np.arange(len(array))) ^ mark(np.array(self.adapters[room]))
            tokens.append(next_token(kv, VOCAB))
        return tokens[len(tokens) - num_tokens :]


class AdaptedRunner(NullRunner):
    """KV is that of the request's adapter."""

    def __init__(self, kv: Any) -> None:
        super().__init__(kv, VOCAB)

    def logits(self, batch: ForwardBatch) -> list[int]:
        super().logits(batch)
        if batch.adapters is not None:
            self._slots[batch.out_slots] ^= np.repeat(mark(batch.adapters), batch.extend_lens)
        return self._next_tokens(batch)


def adapted_model(num_pages: int) -> tuple[Any, NullRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, AdaptedRunner(kv)


def mark(adapters: Any) -> Any:
    """What is in the KV of each adapter; that of none is as it is."""
    return np.atleast_1d(adapters + 1).astype(np.uint64) * np.uint64(0xABCD_EF01_2345_6789)


def play(make_pair: type[Pair], overlap: bool, num_requests: int) -> list[Any]:
    scheduling = Scheduling("priority", max_waiting=100, tenant_weights={"a": 3.0})
    pair = make_pair(prefill_pages=40, decode_pages=40, scheduling=scheduling, overlap=overlap, check_every=200)
    game = Play(pair, random.Random(1))
    game.run(num_requests)
    pair.close()
    game.verify()
    pair.assert_clean()
    assert pair.decode.core.report().counts.retractions > 0
    return game.story()


def test_many_requests_are_all_answered_and_the_same_seed_gives_the_same(make_pair: type[Pair]) -> None:
    assert play(make_pair, False, NUM_REQUESTS) == play(make_pair, False, NUM_REQUESTS)


def test_many_requests_are_all_answered_by_a_decode_worker_that_overlaps(make_pair: type[Pair]) -> None:
    play(make_pair, True, NUM_REQUESTS)


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_with_equal_prompts_share_them_and_nothing_else(make_pair: type[Pair], overlap: bool) -> None:
    """The pools are tiny, and some are aborted; whose prefix is coming waits, however short it is."""
    pair = make_pair(
        prefill_pages=56,
        decode_pages=56,
        model=adapted_model,
        prompt_cost=PromptCost(step_cost=0),
        overlap=overlap,
        check_every=200,
    )
    game = EqualPrompts(pair, random.Random(SEED), most_open=16)
    game.run(NUM_EQUAL)
    pair.close()
    game.verify()
    pair.assert_clean()
    num_tokens = sum(len(prompt) for prompt, _ in game.asked.values())
    assert pair.decode.core.report().counts.retractions > 0
    assert pair.prefill.runner.num_tokens < 0.45 * num_tokens
    assert pair.num_written * PAGE < 0.6 * num_tokens


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
