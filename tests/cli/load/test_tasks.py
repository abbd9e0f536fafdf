from __future__ import annotations

import json
import math
from typing import Any

import pytest

from diptych.cli.load.tasks import Piece, Score, Task, chosen, difference, judged, score_of, tasks_of, words
from diptych.common.errors import ConfigError

TEXT, QUESTION = {"text": "abc"}, {"question": "q", "choices": ["a", "bb"], "answer": 1}


def told(offsets: list[int], values: list[float | None]) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"text_offset": offsets, "token_logprobs": values}}]}


def test_a_file_has_texts_and_questions() -> None:
    assert tasks_of([json.dumps(TEXT), "", json.dumps(QUESTION)]) == [
        Task([Piece("", "abc")]),
        Task([Piece("q", "a"), Piece("q", "bb")], 1),
    ]


@pytest.mark.parametrize(
    ("line", "words_of_it"),
    [
        ("{", "line 1 is no JSON"),
        ("{}", "neither"),
        (json.dumps({"text": ""}), "neither"),
        (json.dumps(QUESTION | {"answer": 2}), "number of a choice"),
        (json.dumps(QUESTION | {"answer": True}), "number of a choice"),
        (json.dumps(QUESTION | {"choices": ["a"]}), "2 to 64 texts"),
        (json.dumps(QUESTION | {"choices": ["a", 2]}), "2 to 64 texts"),
        ("", "no task"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(line: str, words_of_it: str) -> None:
    with pytest.raises(ConfigError, match=words_of_it):
        tasks_of([line])


def test_what_counts_are_the_tokens_of_the_piece_alone() -> None:
    answer = told([0, 2, 4, 6, 9], [None, -1.0, -2.0, -4.0, -8.0])  # the last one was generated
    assert score_of(answer, Piece("", "abcdefghi")) == Score(-7.0, 3)
    assert score_of(answer, Piece("abcdef", "ghi")) == Score(-4.0, 1)
    assert score_of(answer, Piece("abcde", "fghi")) == Score(-6.0, 2)  # a token spans its beginning


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"logprobs": None}]}])
def test_a_server_without_log_probabilities_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigError, match="echo with logprobs"):
        score_of(answer, Piece("", "a"))


def test_texts_have_a_perplexity_and_questions_an_accuracy() -> None:
    tasks = tasks_of([json.dumps(each) for each in (TEXT, QUESTION, QUESTION | {"answer": 0})])
    scores = [[Score(-2 * math.log(2), 2)], *([[Score(-1.0, 1), Score(-1.5, 2)]] * 2)]
    found = judged(tasks, scores)
    assert (round(found.perplexity, 9), round(found.bits_per_byte, 9), found.num_tokens) == (2.0, round(2 / 3, 9), 2)
    assert (found.num_questions, found.accuracy, found.accuracy_by_byte) == (2, 0.5, 0.5)
    assert tuple(line.split(" by")[0].split(",")[0] for line in words(found).splitlines()) == (
        "perplexity 2.0000",
        "accuracy   50.0%",
    )
    assert [chosen(scores[1]), chosen(scores[1], [1, 2])] == [0, 1]


def test_two_servers_are_compared_by_token_and_by_answer() -> None:
    one = [[Score(-1.0, 1)], [Score(-1.0, 1), Score(-2.0, 1)]]
    other = [[Score(-1.5, 2)], [Score(-3.0, 1), Score(-2.0, 1)]]
    found = difference(one, other)
    assert (round(found.mean, 9), found.largest, found.changed_answers) == (round((0.5 + 2.0) / 3, 9), 2.0, 1)
