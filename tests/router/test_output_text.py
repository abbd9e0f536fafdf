from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from diptych.engine.sampling_params import SamplingParams
from diptych.router.output_text import OutputText

EOS = 256
TEXT = "Zoë says: 你好 🙂! stop here"


def read(output: OutputText, token_ids: Sequence[int], size: int) -> tuple[str, int]:
    """Push runs of `size` tokens; return the text and the number of tokens that count."""
    text, count = "", 0
    for start in range(0, len(token_ids), size):
        new, counted = output.push(token_ids[start : start + size])
        text, count = text + new, count + len(counted)
        if output.is_stopped:
            break
    return text + output.flush(), count


@pytest.fixture
def start(byte_tokenizer: Any) -> Callable[..., OutputText]:
    return lambda **params: OutputText(byte_tokenizer, SamplingParams(**params))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_characters_of_several_tokens_come_whole(
    start: Callable[..., OutputText], byte_tokenizer: Any, size: int
) -> None:
    token_ids = byte_tokenizer.encode(TEXT)
    assert read(start(), token_ids, size) == (TEXT, len(token_ids))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_stop_string_over_several_tokens_ends_text_and_count(
    start: Callable[..., OutputText], byte_tokenizer: Any, size: int
) -> None:
    before, stop = TEXT.split("stop")[0], "stop"
    wanted = (before, len(byte_tokenizer.encode(before + stop)))
    assert read(start(stop=(stop, "never")), byte_tokenizer.encode(TEXT), size) == wanted


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end(
    start: Callable[..., OutputText], byte_tokenizer: Any
) -> None:
    output = start(stop=("stopped",))
    assert output.push(byte_tokenizer.encode("do stop")) == ("do ", byte_tokenizer.encode("do stop"))
    assert (output.flush(), output.is_stopped) == ("stop", False)


def test_an_unfinished_character_is_shown_as_such_in_the_end(
    start: Callable[..., OutputText], byte_tokenizer: Any
) -> None:
    output = start()
    assert output.push(byte_tokenizer.encode("🙂")[:3])[0] == ""
    assert output.flush() == "\ufffd"


def test_tokens_that_end_the_request_count_but_have_no_text(
    start: Callable[..., OutputText], byte_tokenizer: Any
) -> None:
    (stop_token,) = byte_tokenizer.encode("!")
    assert read(start(stop_token_ids=(stop_token,)), byte_tokenizer.encode("hi!"), 1) == ("hi", 3)
    assert read(start(), [*byte_tokenizer.encode("hi"), EOS], 1) == ("hi", 3)
