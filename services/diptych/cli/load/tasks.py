"""Tasks by which a model is judged, and what its log-probabilities make of them: perplexity, and choices. Pure.

A task file has a JSON object a line: `{"text": ...}`, or `{"question": ..., "choices": [...], "answer": 0}`. A choice
is as likely as its tokens behind the question; the likeliest is the model's answer, by itself and by the byte, since
long ones are less likely (EleutherAI's lm-evaluation-harness calls these acc and acc_norm).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from diptych.common.errors import ConfigError

MAX_CHOICES: Final = 64


class Score(NamedTuple):
    """How likely a text is behind another one."""

    logprob: float
    num_tokens: int


class Piece(NamedTuple):
    """A text to be scored, and what stands in front of it."""

    context: str
    text: str


@dataclass(frozen=True, slots=True)
class Task:
    """One line of a file. Without an answer it is a text whose perplexity is wanted."""

    pieces: Sequence[Piece]
    answer: int | None = None


class Judged(NamedTuple):
    """What came of all tasks; nan where there are none of a kind."""

    num_texts: int
    num_tokens: int
    perplexity: float  # by token
    bits_per_byte: float
    num_questions: int
    accuracy: float
    accuracy_by_byte: float


class Difference(NamedTuple):
    """How two servers differ, by token."""

    mean: float  # of |log-probability of one - of the other|, per token of each piece
    largest: float
    changed_answers: int


def tasks_of(lines: Sequence[str]) -> list[Task]:
    """Raises `ConfigError` that names the line."""
    tasks = [_task(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise ConfigError("there is no task in it")
    return tasks


def score_of(answer: Mapping[str, Any], piece: Piece) -> Score:
    """Return what a completion with `echo` says of a piece. Raises `ConfigError` if it does not say it.

    A token counts that ends in the piece: one that spans its beginning does, and what was generated does not. The first
    token of a text has no log-probability, and does not count.
    """
    try:
        told = answer["choices"][0]["logprobs"]
        offsets, values = told["text_offset"], told["token_logprobs"]
    except (LookupError, TypeError):
        raise ConfigError("the server gives no log-probabilities of prompts: it must take echo with logprobs") from None
    begin, end = len(piece.context), len(piece.context) + len(piece.text)
    ends = [*offsets[1:], math.inf]
    chosen = [
        value
        for offset, until, value in zip(offsets, ends, values, strict=True)
        if until > begin and offset < end and value is not None
    ]
    return Score(sum(chosen), len(chosen))


def judged(tasks: Sequence[Task], scores: Sequence[Sequence[Score]]) -> Judged:
    """Return what scores say, one for each piece of each task."""
    texts = [(task, found[0]) for task, found in zip(tasks, scores, strict=True) if task.answer is None]
    asked = [(task, found) for task, found in zip(tasks, scores, strict=True) if task.answer is not None]
    total, num_tokens = sum(score.logprob for _, score in texts), sum(score.num_tokens for _, score in texts)
    num_bytes = sum(len(task.pieces[0].text.encode()) for task, _ in texts)
    return Judged(
        num_texts=len(texts),
        num_tokens=num_tokens,
        perplexity=math.exp(min(700.0, -total / num_tokens)) if num_tokens else math.nan,
        bits_per_byte=-total / math.log(2) / num_bytes if num_bytes else math.nan,
        num_questions=len(asked),
        accuracy=_share([chosen(found) == task.answer for task, found in asked]),
        accuracy_by_byte=_share([chosen(found, _sizes(task)) == task.answer for task, found in asked]),
    )


def chosen(scores: Sequence[Score], sizes: Sequence[int] = ()) -> int:
    """Return the likeliest choice, the first of equal ones; with `sizes`, by each unit of them."""
    values = [score.logprob / size for score, size in zip(scores, sizes or [1] * len(scores), strict=True)]
    return values.index(max(values))


def difference(one: Sequence[Sequence[Score]], other: Sequence[Sequence[Score]]) -> Difference:
    """Return how far two servers' scores of the same tasks are apart."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    apart = [abs(a.logprob - b.logprob) / max(1, a.num_tokens) for a, b in pairs]
    changed = sum(len(a) > 1 and chosen(a) != chosen(b) for a, b in zip(one, other, strict=True))
    return Difference(sum(apart) / max(1, len(apart)), max(apart, default=0.0), changed)


def words(found: Judged) -> str:
    """Return what is printed of one server."""
    lines = []
    if found.num_texts:
        lines.append(
            f"perplexity {found.perplexity:.4f} by token, {found.bits_per_byte:.4f} bits a byte: "
            f"{found.num_texts} texts, {found.num_tokens} tokens"
        )
    if found.num_questions:
        lines.append(
            f"accuracy   {found.accuracy:.1%}, by byte {found.accuracy_by_byte:.1%}: {found.num_questions} questions"
        )
    return "\n".join(lines)


def _task(line: str, number: int) -> Task:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"line {number} is no JSON: {error}") from None
    match row:
        case {"text": str(text)} if text:
            return Task([Piece("", text)])
        case {"question": str(question), "choices": [*choices], "answer": int(answer)} if question:
            if not 2 <= len(choices) <= MAX_CHOICES or not all(isinstance(each, str) and each for each in choices):
                raise ConfigError(f"line {number}: choices must be 2 to {MAX_CHOICES} texts")
            if isinstance(answer, bool) or not 0 <= answer < len(choices):
                raise ConfigError(f"line {number}: answer must be the number of a choice, from 0 on")
            return Task([Piece(question, choice) for choice in choices], answer)
    raise ConfigError(f'line {number} has neither "text", nor "question", "choices" and "answer"')


def _sizes(task: Task) -> Sequence[int]:
    return [len(piece.text.encode()) for piece in task.pieces]


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else math.nan
