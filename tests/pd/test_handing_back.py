"""A worker that leaves hands rooms back at any point of their life. Routers hear so from it alone; nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from null_runner import expected_output

from diptych.engine.values.events import HandBack
from diptych.generation.output import LEAVING, FailureCode

Pair = Any

VOCAB = 1000
PROMPT = list(range(40))
NUM_TOKENS = 12


def hand_back(pair: Pair, side: Any, room: int) -> None:
    side.core.handle(HandBack(room), pair.now_s)
    side.collect()


def play(pair: Pair, num_moves: int) -> None:
    """One fixed way through a request's life, a move at a time."""
    both = (pair.prefill, pair.decode)
    pair.start(1, PROMPT, max_tokens=NUM_TOKENS)
    pair.deliver(pair.decode)
    for number in range(num_moves):
        side = both[number % 2]
        pair.step(side)
        pair.deliver(side)


@pytest.mark.parametrize("num_moves", range(0, 20, 2))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_room_is_handed_back_once_and_goes_on_elsewhere_where_it_was(pair: Pair, role: str, num_moves: int) -> None:
    play(pair, num_moves)
    leaving, other = getattr(pair, role), pair.decode if role == "prefill" else pair.prefill
    hand_back(pair, leaving, 1)
    hand_back(pair, leaving, 1)
    pair.run()
    for side in (leaving, other):
        assert len([output for output in side.outputs[1] if output.finish or output.failure]) == 1
    assert leaving.ended(1).failure == LEAVING or (leaving.ended(1).failure is None and num_moves > 0)
    assert other.ended(1).failure is None or other.ended(1).failure.code is FailureCode.ABORTED
    tokens = pair.tokens(1)
    if not pair.decode.ended(1).finish:
        pair.start(2, PROMPT + tokens, max_tokens=NUM_TOKENS - len(tokens))
        pair.run()
        tokens += pair.tokens(2)
    assert tokens == expected_output(PROMPT, NUM_TOKENS, VOCAB)
    pair.assert_clean()


def test_prefill_keeps_what_it_has_handed_off_until_decode_acknowledges(pair: Pair) -> None:
    pair.start(1, PROMPT, max_tokens=NUM_TOKENS)
    pair.deliver(pair.decode)
    while not pair.prefill.outputs[1]:
        pair.step(pair.prefill)
    hand_back(pair, pair.prefill, 1)
    assert pair.prefill.cache.pool.counts()["exporting"] > 0
    pair.run()
    assert pair.prefill.ended(1).finish
    assert pair.tokens(1) == expected_output(PROMPT, NUM_TOKENS, VOCAB)
    pair.assert_clean()


def test_a_room_that_has_ended_is_not_handed_back(pair: Pair) -> None:
    pair.start(1, PROMPT, max_tokens=2)
    pair.run()
    for side in (pair.prefill, pair.decode):
        hand_back(pair, side, 1)
        assert side.ended(1).failure is None
    pair.assert_clean()
