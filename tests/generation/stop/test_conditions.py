from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.generation.finish import Finish
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.stop.conditions import StopResult, StopStrings, token_finish

EOS_IDS = frozenset({1, 2})


@pytest.mark.parametrize(
    ("token_id", "num_output_tokens", "params", "expected"),
    [
        (7, 1, SamplingParams(max_tokens=2), None),
        (7, 2, SamplingParams(max_tokens=2), Finish.LENGTH),
        (7, 3, SamplingParams(max_tokens=2), Finish.LENGTH),
        (2, 1, SamplingParams(max_tokens=2), Finish.STOP),
        (2, 2, SamplingParams(max_tokens=2), Finish.STOP),
        (2, 1, SamplingParams(max_tokens=2, ignore_eos=True), None),
        (2, 2, SamplingParams(max_tokens=2, ignore_eos=True), Finish.LENGTH),
        (7, 1, SamplingParams(max_tokens=2, stop_token_ids=(6, 7)), Finish.STOP),
        (2, 1, SamplingParams(max_tokens=2, stop_token_ids=(2,), ignore_eos=True), Finish.STOP),
    ],
)
def test_a_token_ends_the_request_by_being_a_stop_token_or_the_last_allowed(
    token_id: int, num_output_tokens: int, params: SamplingParams, expected: Finish | None
) -> None:
    assert token_finish(token_id, num_output_tokens, params, EOS_IDS) == expected


def streamed(stops: list[str], pieces: list[str]) -> list[str]:
    """Return what each push showed, up to the stop, and what the flush did."""
    cutter = StopStrings(stops)
    shown = []
    for piece in pieces:
        result = cutter.push(piece)
        shown.append(result.text)
        if result.stopped:
            break
    return [*shown, cutter.flush()]


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert streamed([], ["ab", "", "c"]) == ["ab", "", "c", ""]


def test_output_ends_before_the_stop_string() -> None:
    assert streamed(["\n\n"], ["one\n", "two", "\n", "\nthree"]) == ["one", "\ntwo", "", "", ""]


def test_a_beginning_that_does_not_go_on_is_shown() -> None:
    assert streamed(["STOP"], ["a S", "T", "UP"]) == ["a ", "", "STUP", ""]
    assert streamed(["STOP"], ["a STO"]) == ["a ", "STO"]


def test_no_more_is_held_back_than_can_become_a_stop_string() -> None:
    assert streamed(["aab"], ["a", "a", "a", "a", "b"]) == ["", "", "a", "a", "", ""]


@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        (["bc", "abcd"], "xabcd", "xa", "bc"),  # "bc" is complete first
        (["cd", "bcd", "d"], "abcd", "a", "bcd"),  # all are complete at "d": the longest counts
        (["b", "b"], "abb", "a", "b"),
        (["é", "漢字"], "a漢漢字é", "a漢", "漢字"),
        (["ab"], "ab", "", "ab"),
    ],
)
def test_the_first_complete_stop_string_counts(stops: list[str], text: str, expected: str, matched: str) -> None:
    assert StopStrings(stops).push(text) == StopResult(expected, stopped=True, matched=matched)


def test_nothing_follows_a_stop() -> None:
    cutter = StopStrings(["b"])
    assert cutter.push("ab") == StopResult("a", stopped=True, matched="b")
    assert cutter.push("c") == StopResult("", stopped=True)
    assert cutter.flush() == ""


def test_a_flush_shows_what_was_held_back_once() -> None:
    cutter = StopStrings(["abc"])
    assert cutter.push("ab") == StopResult("", stopped=False)
    assert cutter.flush() == "ab"
    assert cutter.flush() == ""


def first_complete(stops: list[str], text: str) -> str | None:
    """Return the text before the first stop string, by trying all."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


def held_back(stops: list[str], text: str) -> str:
    """Return the longest end of the text that begins a stop string, by trying all."""
    ends = (text[start:] for start in range(len(text)))
    return next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")


letters = st.text("abc", max_size=6)


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(letters, max_size=8))
def test_any_pieces_are_cut_as_the_whole_text_is(stops: list[str], pieces: list[str]) -> None:
    cutter = StopStrings(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        result = cutter.push(piece)
        shown += result.text
        expected = first_complete(stops, text)
        assert result.stopped == (expected is not None)
        assert shown == (text.removesuffix(held_back(stops, text)) if expected is None else expected)
    assert shown + cutter.flush() == (text if first_complete(stops, text) is None else first_complete(stops, text))
