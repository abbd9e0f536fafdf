"""Stopping at a regular expression: wherever the text is cut, and whatever the pattern does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stop_expressions import Counted

from diptych.generation.stop.conditions import StopRegex
from diptych.generation.stop.pattern import MAX_HELD, compile_stop

PATTERNS = [
    "ab",
    "a+b",
    "b|abc",
    r"a.*?c",
    r"c$",
    r"(?m)b$\nc",
    r"^a|\Abc",
    r"[bc]{3}",
    r"(?i)AC",
    r"b\b",
    r"a\B",
    r" \b|b.?\Z",
]


def start(*patterns: str) -> StopRegex:
    return StopRegex(compile_stop(patterns))


def read(patterns: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop, shown = start(*patterns), ""
    for piece in pieces:
        result = stop.push(piece)
        shown += result.text
        if result.stopped:
            return shown, True
    return shown + stop.flush(), False


def reference(patterns: list[str], text: str) -> tuple[str, bool]:
    """Look for each pattern after each character."""
    for end in range(1, len(text) + 1):
        found = [match.start() for pattern in patterns if (match := re.search(pattern, text[:end], re.ASCII))]
        if found:
            return text[: min(found)], True
    return text, False


@given(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3), st.lists(st.text("abcé \n", max_size=4), max_size=8)
)
def test_the_text_ends_at_the_first_match_wherever_it_was_cut(patterns: list[str], pieces: list[str]) -> None:
    wanted = reference(patterns, "".join(pieces))
    assert read(patterns, pieces) == wanted


def test_only_what_may_become_a_match_is_held_back() -> None:
    stop = start(r"\d+ items", "xyz")
    assert stop.push("there are 12 it").text == "there are "
    assert stop.push("ches, x").text == "12 itches, "
    assert stop.push("y").text == ""
    assert (stop.push("z").stopped, stop.flush()) == (True, "")


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [("ab.*", "xab", "x"), (r"a\b", "xa", "x"), (r"-\b", "x-y", "x"), (r"a\B", "a ab", "a "), ("a$", "ba", "b")],
)
def test_a_match_is_complete_with_its_last_needed_character(pattern: str, text: str, shown: str) -> None:
    stop = start(pattern)
    assert "".join(stop.push(char).text for char in text[:-1]) == shown
    assert stop.push(text[-1]).stopped


def test_assertions_see_what_was_shown_already() -> None:
    assert read([r"\bb", "^c", "(?m)^d"], ["a", "b c", "d", "\n", "d"]) == ("ab cd\n", True)


def test_a_match_that_never_completes_holds_back_a_bounded_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.generation.stop.conditions.MAX_HELD", 128)
    stop, shown = start(r"é.*z"), ""
    for _ in range(3 * 128):
        shown += stop.push("é").text
    assert len(shown) == 2 * 128
    assert stop.flush() == "é" * 128


@pytest.mark.parametrize("text", ["\ud83d", "a\ude42b", "\x00\ufffe🙂"])
def test_text_of_any_characters_is_searched_and_comes_back_as_it_was(text: str) -> None:
    assert read(["[^a]{9}Z"], list(text * 5)) == (text * 5, False)
    assert read(["Z"], [text, "Z"]) == (text, True)


@pytest.mark.parametrize("pattern", ["(a|aa)+b", "(a+)+[^a]b", "a.*b.*c"])
def test_a_piece_is_searched_twice_whatever_was_held_back(pattern: str) -> None:
    counted = Counted(compile_stop((pattern, "never")))
    stop = StopRegex(counted)  # type: ignore[arg-type]
    for num_pieces in range(1, MAX_HELD):
        stop.push("aaaa")
        assert counted.num_searches == 2 * num_pieces


def test_the_piece_that_completes_a_match_is_searched_a_few_times_more() -> None:
    counted = Counted(compile_stop(("a.*?b",)))
    result = StopRegex(counted).push("x" * 500 + "a" + "x" * 300 + "b" * 223)  # type: ignore[arg-type]
    assert (result.text, result.stopped) == ("x" * 500, True)
    assert counted.num_searches == 2 + 10  # halving 1,024 characters
