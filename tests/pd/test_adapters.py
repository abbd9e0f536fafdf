"""Legs that run with adapters: they never mix, and their KV is shared with nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from null_runner import expected_output

from diptych.common.members.roles import LegKind
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.events import Start
from diptych.engine.values.request import new_request
from diptych.generation.output import FailureCode
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.slo import Slo

Pair = Any  # the fixture's class: test helpers can't be imported
NewPair = Callable[..., Pair]
PROMPT = list(range(1, 20))


def test_legs_with_different_adapters_fail_before_a_page_moves(pair: Pair) -> None:
    pair.start_decode(1, PROMPT, extra_key=b"the weights of one", adapter=0)
    pair.start_prefill(1, PROMPT, extra_key=b"those of another", adapter=0)
    pair.run()
    assert pair.prefill.ended(1).failure.code is FailureCode.INVALID
    assert pair.decode.ended(1).failure is not None
    assert pair.num_written == 0
    pair.assert_clean()


def test_the_same_prompt_moves_once_for_each_adapter(pair: Pair) -> None:
    moved = []
    for room, key in enumerate((b"", b"one", b"another", b"one", b""), start=1):
        before = pair.num_written
        pair.start(room, PROMPT, extra_key=key)
        pair.run()
        assert pair.tokens(room) == expected_output(PROMPT, 5, 1000)
        moved.append(pair.num_written - before)
    assert moved == [5, 5, 5, 1, 1]
    pair.assert_clean()


@pytest.mark.parametrize("decode_pages", [64, 15])
def test_with_one_slot_on_each_side_requests_of_many_adapters_never_wait_for_each_other(
    make_pair: NewPair, decode_pages: int
) -> None:
    """Their legs come in opposite order, so that each side would begin with what the other has last."""
    pair = make_pair(num_slots=1, decode_pages=decode_pages)
    rooms = range(1, 9)
    for room in rooms:
        pair.start_decode(room, PROMPT, extra_key=bytes([room % 4]), adapter=room % 4)
    for room in reversed(rooms):
        pair.start_prefill(room, PROMPT, extra_key=bytes([room % 4]), adapter=room % 4)
    pair.run()
    assert [pair.tokens(room) for room in rooms] == [expected_output(PROMPT, 5, 1000)] * len(rooms)
    assert all(side.turns.num_placed >= 4 for side in (pair.prefill, pair.decode))
    assert_nobody_waits(pair)


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_with_few_slots_and_pages_all_requests_are_answered(make_pair: NewPair, seed: int) -> None:
    """Legs come while others run, some for decode alone; some are aborted on one side."""
    rng, rooms, alone = random.Random(seed), range(1, 25), range(101, 110)
    pages = {"decode_pages": rng.choice([14, 20, 40]), "prefill_pages": rng.choice([12, 20, 40])}
    pair = make_pair(num_slots=rng.choice([1, 2, 3]), **pages)
    prompts = {room: list(range(1, rng.randint(2, 22))) for room in (*rooms, *alone)}
    adapters = {room: rng.choice([-1, 0, 1, 2, 3, 4]) for room in (*rooms, *alone)}
    legs = [(start, room) for start in (pair.start_prefill, pair.start_decode) for room in rooms]
    legs += [(partial(start_alone, pair), room) for room in alone]
    moves = [(move, side) for move in (pair.deliver, pair.step) for side in (pair.prefill, pair.decode)]
    for start, room in rng.sample(legs, len(legs)):
        start(room, prompts[room], extra_key=bytes([1 + adapters[room]]), adapter=adapters[room])
        for move, side in rng.choices(moves, k=rng.randint(0, 6)):
            move(side)
    aborted = rng.sample(rooms, 4)
    for room in aborted:
        pair.abort(rng.choice([pair.prefill, pair.decode]), room)
    pair.run()
    for room in {*rooms, *alone} - set(aborted):
        assert pair.tokens(room) == expected_output(prompts[room], 5, 1000)
    assert_nobody_waits(pair)


def start_alone(pair: Pair, room: int, prompt: list[int], max_tokens: int = 5, **fields: Any) -> None:
    """Start a request that decode computes from its first token on."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = new_request(room, np.array(prompt, dtype=np.int64), params, **fields)
    pair.decode.core.handle(Start(request, 0, LegKind.LOCAL), pair.now_s)
    pair.decode.collect()


def num_held(pair: Pair) -> int:
    return int(pair.decode.cache.pool.counts()["owned"])


def test_a_request_that_is_served_alone_holds_no_memory_while_it_waits_for_a_slot(make_pair: NewPair) -> None:
    pair = make_pair(num_slots=1)
    start_alone(pair, 1, PROMPT, 20, extra_key=b"one", adapter=0)
    for _ in range(3):
        pair.step(pair.decode)
    held = num_held(pair)
    for room in range(2, 6):
        start_alone(pair, room, PROMPT, extra_key=b"another", adapter=1)
    assert num_held(pair) == held
    assert pair.decode.turns.num_waiting == 4
    start_alone(pair, 6, PROMPT)
    for _ in range(10):
        pair.step(pair.decode)
    assert pair.tokens(6) == expected_output(PROMPT, 5, 1000), "it passes them"
    assert pair.tokens(2) == []
    pair.abort(pair.decode, 1)
    pair.run()
    assert [pair.tokens(room) for room in range(2, 6)] == [expected_output(PROMPT, 5, 1000)] * 4
    assert_nobody_waits(pair)


def test_kv_that_came_does_not_wait_for_requests_that_wait_for_its_memory(make_pair: NewPair) -> None:
    """The one that is served alone was first, and needs what the others hold: they must have the slot before it."""
    pair = make_pair(num_slots=1, decode_pages=14)
    start_alone(pair, 1, PROMPT[:2], 5, extra_key=b"one", adapter=0)
    pair.step(pair.decode)
    start_alone(pair, 4, PROMPT * 2, extra_key=b"four", adapter=4)
    for room in (2, 3):
        pair.start(room, PROMPT[:8], extra_key=bytes([room]), adapter=room)
    while any([pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill)]):
        pass
    assert pair.decode.core.num_decoding == 3, "they are here"
    assert pair.decode.turns.num_waiting == 1
    pair.run()
    assert pair.tokens(4) == expected_output(PROMPT * 2, 5, 1000)
    assert [pair.tokens(room) for room in (2, 3)] == [expected_output(PROMPT[:8], 5, 1000)] * 2
    assert_nobody_waits(pair)


def test_a_prompt_that_has_the_only_slot_goes_on_however_late_the_output_is_that_waits_for_it(
    make_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A millisecond a token: two per token leave no time for a prompt that is worth a step."""
    pair, slo = make_pair(num_slots=1, max_step_tokens=8), Slo(tpot_s=0.002)
    execute = pair.decode.runner.execute

    def timed(batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        pair.now_s += len(batch.input_ids) / 1000
        result: StepResult = execute(batch, sampling)
        return result

    monkeypatch.setattr(pair.decode.runner, "execute", timed)
    start_alone(pair, 1, PROMPT * 2, extra_key=b"one", adapter=0)
    pair.step(pair.decode)
    pair.start(2, PROMPT[:8], extra_key=b"two", adapter=1, slo=slo)
    while any([pair.deliver(pair.decode), pair.step(pair.prefill), pair.deliver(pair.prefill)]):
        pass
    assert (pair.decode.core.num_decoding, pair.tokens(1)) == (1, [])
    pair.now_s += 1.0
    pair.run()
    assert pair.tokens(1) == expected_output(PROMPT * 2, 5, 1000)
    assert pair.tokens(2) == expected_output(PROMPT[:8], 5, 1000)
    assert_nobody_waits(pair)


def assert_nobody_waits(pair: Pair) -> None:
    for side in (pair.prefill, pair.decode):
        side.turns.check()
        assert side.turns.num_waiting == 0
    pair.assert_clean()
