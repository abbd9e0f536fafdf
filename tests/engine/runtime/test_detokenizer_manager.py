from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.finish import Finish
from diptych.engine.runtime.detokenizer_manager import DetokenizerManager, TextDelta


class Letters:
    """Token 1 is "a", 2 is "b", ...; 0 is special and has no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(96 + token_id) for token_id in ids if token_id)


MANAGER = DetokenizerManager(Letters())


def test_text_follows_the_tokens_and_the_end_is_passed_on() -> None:
    stream = MANAGER.open(())
    assert stream.push([1, 2], None) == TextDelta("ab", (1, 2), None)
    assert stream.push([3, 0], Finish.STOP) == TextDelta("c", (3, 0), Finish.STOP)


def test_a_stop_string_over_two_pushes_ends_the_text_before_it() -> None:
    stream = MANAGER.open(["cd"])
    assert stream.push([1, 2, 3], None) == TextDelta("ab", (1, 2, 3), None)
    assert stream.push([4, 5], None) == TextDelta("", (4,), Finish.STOP)


def test_what_was_held_back_comes_with_the_end() -> None:
    stream = MANAGER.open(["cd"])
    assert stream.push([3], None) == TextDelta("", (3,), None)
    assert stream.push([], Finish.LENGTH) == TextDelta("c", (), Finish.LENGTH)
