from __future__ import annotations

import pytest

from diptych.common.errors import InvalidRequest
from diptych.lang.backend import Message
from diptych.lang.transcript import Transcript
from tests.lang.conftest import Reciter


def chars(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_text_is_tokenised_in_one_piece_up_to_an_output_and_the_output_keeps_its_tokens(reciter: Reciter) -> None:
    said = Transcript().with_text("a").with_text("b").tokenized(reciter)
    assert said.token_ids == (1, *chars("ab"))
    said = said.with_output("cd", (777,)).with_text("e").tokenized(reciter)
    assert (said.token_ids, said.text) == ((1, *chars("ab"), 777, *chars("e")), "abcde")


def test_a_chat_begins_with_what_its_template_makes(reciter: Reciter) -> None:
    said = Transcript().begun("user").with_text("hi").ended("user").begun("assistant").with_text("Well,")
    asked = said.tokenized(reciter)
    assert asked.token_ids == (1, *chars("<user>hi<assistant>Well,"))
    over = asked.with_output(" no", chars(" no")).ended("assistant")
    assert over.messages == (Message("user", "hi"), Message("assistant", "Well, no"))
    assert over.shown() == "hi\nWell, no"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda said: said.begun("user").begun("user"), "within one of role 'user'"),
        (lambda said: said.with_text("a").begun("user"), "belongs to no message"),
        (lambda said: said.begun("user").ended("assistant"), "one of role 'user' is open"),
        (lambda said: said.ended("user"), "none is open"),
        (lambda said: said.begun("user").ended("user").with_text("a"), "put it into a role"),
        (lambda said: said.begun("user").tokenized(Reciter()), "user is open"),
        (lambda said: said.begun("user").ended("user").tokenized(Reciter()), "none is open"),
    ],
)
def test_what_no_template_can_say_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        wrong(Transcript())  # type: ignore[operator]
