from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from diptych.generation.finish import Finish
from diptych.generation.logprobs import TokenLogprobs
from diptych.generation.output_text import OutputText, TextDelta
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.detokenizer import ByteDetokenizer

EOS = 256
TEXT = "Zoë says: 你好 🙂! stop here"
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 5, 100])


class Bytes:
    """One token a byte, and one for the end."""

    eos_ids = (EOS,)

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer({**{byte: bytes([byte]) for byte in range(256)}, EOS: b""})


def start(**params: Any) -> OutputText:
    return OutputText(Bytes(), SamplingParams(**params))


def read(output: OutputText, token_ids: Sequence[int], size: int = 1) -> tuple[str, int, Finish | None]:
    """Push runs of `size` tokens; return the text, the number of tokens that count, and how it ended."""
    text, count = "", 0
    for at in range(0, len(token_ids), size):
        is_last = at + size >= len(token_ids)
        delta = output.push(token_ids[at : at + size], Finish.LENGTH if is_last else None)
        text, count = text + delta.text, count + len(delta.token_ids)
        if delta.finish:
            return text, count, delta.finish
    raise AssertionError


@SIZES
def test_characters_of_several_tokens_come_whole(size: int) -> None:
    token_ids = TEXT.encode()
    assert read(start(), token_ids, size) == (TEXT, len(token_ids), Finish.LENGTH)
    deltas = [start().push(token_ids[:count]).text for count in range(len(token_ids))]
    assert all("\ufffd" not in text and TEXT.startswith(text) for text in deltas)


@SIZES
@pytest.mark.parametrize("stop", [{"stop": ("stop", "never")}, {"stop_regex": ("s.o[p-z]", "never")}])
def test_what_stops_the_text_over_several_tokens_ends_text_and_count(size: int, stop: dict[str, Any]) -> None:
    before = TEXT.split("stop")[0]
    assert read(start(**stop), TEXT.encode(), size) == (before, len((before + "stop").encode()), Finish.STOP)


@SIZES
def test_of_a_stop_string_and_an_expression_the_earlier_text_counts(size: int) -> None:
    def ends(stop: str, pattern: str) -> str:
        return read(start(stop=(stop,), stop_regex=(pattern,)), b"one two three four", size)[0]

    assert ends("three", "tw+o") == "one "
    assert ends("two", "th+ree") == "one "
    assert ends(" two", "one|tw") == ""


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end() -> None:
    output = start(stop=("stopped",), stop_regex=("do stop.",))
    assert output.push(b"so do stop") == TextDelta("so ", b"so do stop", offsets=list(range(10)))
    assert output.push(b"", Finish.LENGTH) == TextDelta("do stop", b"", Finish.LENGTH, offsets=[])


def test_an_unfinished_character_is_shown_as_such_in_the_end() -> None:
    output = start()
    assert output.push("🙂".encode()[:3]).text == ""
    assert output.push((), Finish.LENGTH).text == "\ufffd"


def test_tokens_that_end_the_request_count_but_have_no_text() -> None:
    assert read(start(stop_token_ids=(ord("!"),)), b"hi!") == ("hi", 3, Finish.LENGTH)
    assert read(start(), [*b"hi", EOS]) == ("hi", 3, Finish.LENGTH)


@SIZES
@pytest.mark.parametrize("stop", [{"stop": ("ab",)}, {"stop_regex": ("ab",)}])
def test_the_text_of_the_first_min_tokens_is_not_searched(size: int, stop: dict[str, Any]) -> None:
    assert read(start(min_tokens=4, **stop), b"ababxab", size) == ("ababx", 7, Finish.STOP)
    assert read(start(min_tokens=3, **stop), b"abaabxab", size) == ("aba", 5, Finish.STOP)


@SIZES
def test_log_probabilities_end_with_the_tokens_and_know_where_these_begin(size: int) -> None:
    output, token_ids = start(stop=("!",), logprobs=1), "é🙂a!b".encode()
    given = TokenLogprobs(tuple(-1.0 * at for at in range(9)), 1, tuple(token_ids), tuple(-0.5 * at for at in range(9)))
    offsets: list[int] = []
    logprobs: list[float] = []
    for at in range(0, len(token_ids), size):
        stop = min(at + size, len(token_ids))
        delta = output.push(token_ids[at:stop], None, given.span(at, stop))
        assert delta.logprobs is not None
        offsets += delta.offsets
        logprobs += delta.logprobs.logprobs
        if delta.finish:
            break
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 3]
    assert logprobs == list(given.logprobs[:8])


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}, {"stop": ("zzz",)}])
@pytest.mark.parametrize(
    ("token_ids", "finish", "named"),
    [
        ((97, EOS), Finish.STOP, EOS),
        ((97, 98), Finish.STOP, 98),
        ((97, 99), Finish.STOP, None),  # a grammar has ended it
        ((97, EOS), Finish.LENGTH, None),
        ((97, 98), None, None),
    ],
)
def test_the_token_that_ended_the_output_is_named(
    params: dict[str, Any], token_ids: Sequence[int], finish: Finish | None, named: int | None
) -> None:
    assert start(stop_token_ids=(98,), **params).push(token_ids, finish).stop_token == named


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}, {"stop": ("zzz",)}])
def test_the_token_that_ended_the_output_is_named_where_its_end_is_told_behind_it(params: dict[str, Any]) -> None:
    output = start(stop_token_ids=(98,), **params)
    assert output.push((97, 98), None).stop_token is None
    assert output.push((), Finish.STOP).stop_token == 98


def test_a_stop_string_is_no_token() -> None:
    delta = start(stop=("b",), stop_token_ids=(99,)).push((97, 98), None)
    assert (delta.stop, delta.stop_token) == ("b", None)
