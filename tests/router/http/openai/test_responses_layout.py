from __future__ import annotations

from diptych.generation.logprobs import TokenLogprobs
from diptych.router.http.openai.responses_layout import TextScores
from diptych.router.values.output import Scores
from diptych.tokens.tokenizer import Tokenizer

EOS = 256


def scores(token_ids: list[int], offsets: list[int]) -> Scores:
    return Scores(token_ids, TokenLogprobs((-0.5,) * len(token_ids)), offsets)


def test_a_tokens_score_waits_for_its_text(byte_tokenizer: Tokenizer) -> None:
    answer = TextScores(byte_tokenizer.token_bytes)
    a, b, lead, trail = byte_tokenizer.encode("abë")
    pushed = [
        answer.push("a", scores([a], [0])),
        answer.push("", scores([b, lead], [1, 2])),  # held back, and half a character
        answer.push("bë", scores([trail], [2])),
        answer.push("", scores([EOS], [3])),
    ]
    tokens = [[entry["bytes"] for entry in told] for told in pushed]
    assert tokens == [[[97]], [], [[98], [0xC3], [0xAB]], []]
    assert answer.told == [entry for told in pushed for entry in told]


def test_text_that_comes_without_tokens_brings_the_scores_that_waited(byte_tokenizer: Tokenizer) -> None:
    answer = TextScores(byte_tokenizer.token_bytes)
    (b,) = byte_tokenizer.encode("b")
    assert answer.push("", scores([b], [0])) == []
    assert [entry["token"] for entry in answer.push("b", None)] == ["b"]


def test_none_are_told_that_nobody_wants() -> None:
    assert TextScores(None).push("a", scores([0], [0])) == []
