"""Legs that run with adapters: they never mix, and their KV is shared with nobody else."""

from __future__ import annotations

from typing import Any

from null_runner import expected_output

from diptych.generation.output import FailureCode

Pair = Any  # the fixture's class: test helpers can't be imported
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
