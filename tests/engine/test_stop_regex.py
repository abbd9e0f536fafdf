"""Stopping at a regular expression: wherever the text is cut, and whatever the pattern does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import InvalidRequest
from diptych.engine.stop_regex import MAX_HELD, StopRegex

PATTERNS = ["ab", "a+b", "b|abc", "(?<=c)a", r"a.*?c", r"c$", r"ab(?!c)", r"[bc]{3}", r"(?i)AC", r"b\b"]


def read(patterns: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop, shown = StopRegex(patterns), ""
    for piece in pieces:
        result = stop.push(piece)
        shown += result.text
        if result.stopped:
            return shown, True
    return shown + stop.flush(), False


def reference(patterns: list[str], text: str) -> tuple[str, bool]:
    """Look for each pattern after each character."""
    for end in range(1, len(text) + 1):
        found = [match.start() for pattern in patterns if (match := re.search(pattern, text[:end]))]
        if found:
            return text[: min(found)], True
    return text, False


@given(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3), st.lists(st.text("abc ", max_size=4), max_size=8))
def test_the_text_ends_at_the_first_match_wherever_it_was_cut(patterns: list[str], pieces: list[str]) -> None:
    wanted = reference(patterns, "".join(pieces))
    assert read(patterns, pieces) == wanted


def test_only_what_may_become_a_match_is_held_back() -> None:
    stop = StopRegex([r"\d+ items", "xyz"])
    assert stop.push("there are 12 it").text == "there are "
    assert stop.push("ches, x").text == "12 itches, "
    assert stop.push("y").text == ""
    assert (stop.push("z").stopped, stop.flush()) == (True, "")


def test_a_match_that_never_completes_holds_back_a_bounded_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.engine.stop_regex.MAX_HELD", 128)
    stop, shown = StopRegex([r"a.*z"]), ""
    for _ in range(3 * 128):
        shown += stop.push("a").text
    assert len(shown) == 2 * 128
    assert stop.flush() == "a" * 128


@pytest.mark.parametrize(
    "pattern",
    ["(", "a*", "$", "x" * 513, "(?:(?:a{1000}){1000}){1000}", "(?P<n>a)(?P<n", "[z-a]", "(?<=a+", "(?P>x)"],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex") as refused:
        StopRegex([pattern])
    assert refused.value.param == "stop_regex"


@pytest.mark.parametrize("pattern", ["(a|aa)+b", "(a+)+[^a]b", "(?R)?a{3}b"])
def test_a_pathological_pattern_fails_the_request_and_hangs_nothing(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.engine.stop_pattern.SEARCH_TIMEOUT_S", 0.005)
    pieces = ["a"] * MAX_HELD
    with pytest.raises(InvalidRequest, match="too long"):
        read([pattern], pieces)
