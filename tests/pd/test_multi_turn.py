"""A conversation's next turn: both sides start from what they have cached of the turns before."""

from __future__ import annotations

from typing import Any

from null_runner import expected_output

VOCAB = 1000
PAGE = 4

Pair = Any  # the fixture's class: test helpers can't be imported


def test_a_second_turn_moves_only_the_pages_that_decode_lacks(pair: Pair) -> None:
    first = list(range(1, 17))  # 4 pages
    pair.start(1, first, max_tokens=9)
    pair.run()
    assert pair.num_written == 4

    second = [*first, *pair.tokens(1), *range(500, 508)]  # 16 + 9 + 8 tokens: 9 pages
    pair.start(2, second, max_tokens=3)
    pair.run()
    assert pair.tokens(2) == expected_output(second, 3, VOCAB)
    # Decode had the KV of the prompt and of all but the last output token: 24 tokens in whole pages.
    assert pair.decode.ended(2).stats.cached_tokens == 24
    assert pair.num_written == 4 + 3
    # Prefill never saw the outputs: it computes them again, from the end of its own prompt.
    assert pair.prefill.ended(2).stats.cached_tokens == 16
    pair.assert_clean()


def test_every_turn_of_a_long_conversation_moves_only_what_is_new(pair: Pair) -> None:
    history = list(range(1, 9))
    num_written = []
    for turn in range(1, 7):
        before = pair.num_written
        pair.start(turn, history, max_tokens=PAGE + 1)
        pair.run()
        assert pair.tokens(turn) == expected_output(history, PAGE + 1, VOCAB)
        num_written.append(pair.num_written - before)
        history = [*history, *pair.tokens(turn), 700 + turn, 800 + turn, 900 + turn]  # two pages a turn
    assert num_written == [2, 1, 1, 1, 1, 1]
    pair.assert_clean()
