"""What comes back of a request, from pieces of text to the whole answer.

What comes with each token is a named tuple: it is made in a fraction of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diptych.generation import insight as insights
from diptych.generation.finish import Finish
from diptych.generation.insight import Insight
from diptych.generation.logprobs import TokenLogprobs, join
from diptych.router.text.parsing.parts import Content, Part
from diptych.router.values.leg_results import NOTHING_PREDICTED, Predicted, Report


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt
    predicted: Predicted = NOTHING_PREDICTED
    image_tokens: int = 0  # of the prompt: places of images


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended."""

    finish: Finish
    usage: Usage
    report: Report | None = None  # if the request wanted one
    stop: str = ""  # the stop string at which it ended, if one did
    stop_token: int | None = None  # the token at which it ended, if one did
    weights_version: str = ""  # what the weights are called that made its last part


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of consecutive tokens of an answer, and where each begins in its text, in characters."""

    token_ids: Sequence[int]
    logprobs: TokenLogprobs  # one less than tokens if they begin with a prompt's first, which has none
    offsets: Sequence[int]


class Piece(NamedTuple):
    """New text for the client, and the tokens it came from. `end` is set in the last piece."""

    text: str
    token_ids: Sequence[int]
    end: End | None = None
    scores: Scores | None = None  # of `token_ids`, if wanted
    prompt: Scores | None = None  # in the first piece, if wanted
    read: Sequence[Part] | None = None  # a chat's `text` as its parser reads it, which may lag; None: all is content
    insight: Insight | None = None  # of `token_ids`, if wanted

    @property
    def parts(self) -> Sequence[Part]:
        """What a chat shows of this piece."""
        if self.read is not None:
            return self.read
        return (Content(self.text),) if self.text else ()


@dataclass(frozen=True, slots=True)
class Output:
    """All pieces of a finished request as one."""

    text: str
    token_ids: Sequence[int]
    end: End
    scores: Scores | None = None
    prompt: Scores | None = None
    parts: Sequence[Part] = ()  # of a chat's message
    insight: Insight | None = None


def total_usage(usages: Sequence[Usage], num_made: int) -> Usage:
    """Return the sum; a prompt counts once, however many outputs (`num_made`) were made of it."""
    if len(usages) == 1:
        return usages[0]
    prompts = usages[::num_made]
    return Usage(
        sum(usage.prompt_tokens for usage in prompts),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in prompts),
        sum((usage.predicted for usage in usages), NOTHING_PREDICTED),
        sum(usage.image_tokens for usage in prompts),
    )


def whole(pieces: Sequence[Piece]) -> Output:
    """Return what the pieces of a request, the last one included, are together."""
    end = pieces[-1].end
    assert end is not None, "a stream ends with its last piece"
    scores = [piece.scores for piece in pieces if piece.scores is not None]
    told = [piece.insight for piece in pieces if piece.insight is not None]
    return Output(
        "".join([piece.text for piece in pieces]),
        [token_id for piece in pieces for token_id in piece.token_ids],
        end,
        _join_scores(scores) if scores else None,
        pieces[0].prompt,
        [part for piece in pieces for part in piece.parts],
        insights.join(told) if told else None,
    )


def _join_scores(parts: Sequence[Scores]) -> Scores:
    return Scores(
        [token_id for part in parts for token_id in part.token_ids],
        join([part.logprobs for part in parts]),
        [offset for part in parts for offset in part.offsets],
    )


def choose_best(outputs: Sequence[Output], num_made: int, num_wanted: int) -> list[Output]:
    """Return the best `num_wanted` of each `num_made` consecutive outputs; all, and in their order, if all are wanted.

    Of several equally probable ones the earlier are better.
    """
    if num_made == num_wanted:
        return list(outputs)
    chosen: list[Output] = []
    for start in range(0, len(outputs), num_made):
        made = sorted(outputs[start : start + num_made], key=_mean_logprob, reverse=True)
        chosen += made[:num_wanted]
    return chosen


def _mean_logprob(output: Output) -> float:
    assert output.scores is not None, "outputs to choose among are scored"
    return sum(output.scores.logprobs.logprobs) / max(1, len(output.scores.logprobs))
