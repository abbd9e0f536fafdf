"""Which expressions stop a request, and what is said of the others."""

from __future__ import annotations

import pytest

from diptych.common.errors import InvalidRequest
from diptych.generation.stop.pattern import MAX_WORK, compile_stop

REFUSED = {
    "(": "is not a regular expression: missing )",
    "[z-a]": "is not a regular expression: bad character range",
    "(?P<n>a)(?P<n": "is not a regular expression",
    "x" * 513: "at most 512 characters, not 513",
    "(?:" * 41 + "a" + "+)" * 41 + "Z": "nested 40 deep",
    "(?:" * 80 + "a" + "+)" * 80 + "Z": "nested 40 deep",
    "(?:(?:a{1000}){1000}){1000}": "is too large: 1000000000 characters",
    "a{4294967294}": "is too large: 4294967294 characters",
    "a{4294967295}": "repetition number is too large",
    "[ab]{400}": "takes too much to search for",
    "[^a]{999}": "takes more than 131072 bytes",
    "a(?=b)": "does not take look-ahead",
    "(?<!a)b": "does not take negative look-ahead or look-behind",
    "(?!)b": "does not take negative look-ahead",
    r"(a)\1": "does not take a reference to a group",
    "(?>a)b": "does not take an atomic group",
    "a++b": "does not take a possessive repeat",
    "(a)?(?(1)b|c)": "does not take a condition on a group",
    "a$b": "before its end; write",
    r"(?:a\Z|b)c": "before its end; write",
    r"a\b$": "behind another one of these",
    r"a\B(?:\b|c)": "behind another one of these",
    "\ud800": "half a character",
    "": "matches before the first character",
    "a*": "matches before the first character",
    "$": "matches before the first character",
    "^": "matches before the first character",
    r"a?\B": "matches before the first character",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_cannot_be_used_is_refused_with_words_that_say_why(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex ") as refused:
        compile_stop((pattern,))
    assert refused.value.param == "stop_regex"
    assert REFUSED[pattern] in str(refused.value)


@pytest.mark.parametrize(
    "patterns",
    [
        (r"\n\s*Human:", r"\n\s*Assistant:", r"\bObservation\b"),
        ("(?s)<tool_call>.*</tool_call>",),
        ("x" * 200,),
        (r"\b(?:" + "|".join(f"word{index}" for index in range(70)) + r")\b",),
        (r"[^\W\d_]{3,8}\?", "(?i)the end", "(?x) a  b # spaces do not count", r"\d{1,3}(?:,\d{3})*\."),
        ("(?:" * 39 + "a" + ")+" * 39 + "Z",),
    ],
)
def test_what_people_write_is_taken_and_bounded(patterns: tuple[str, ...]) -> None:
    pattern = compile_stop(patterns)
    assert (pattern.complete.programsize + pattern.begun.programsize) * pattern.held_len <= MAX_WORK


def test_the_bound_is_on_all_expressions_of_a_request_together() -> None:
    pattern = "(?s)<answer>[^<].*</answer>"
    compile_stop((pattern,))
    with pytest.raises(InvalidRequest, match="takes too much to search for"):
        compile_stop((pattern,) * 4)


def test_classes_are_of_ascii_and_cases_of_all_letters() -> None:
    word, any_case = compile_stop((r"\w",)), compile_stop(("(?i)é",))
    assert word.match_start("é".encode(), 0) is None
    assert any_case.match_start("É".encode(), 0) == 0
