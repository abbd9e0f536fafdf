"""Log-probabilities as one request reports them: of its output tokens, and of its prompt's.

They are of the model's own distribution: before temperature, penalties, bias and constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diptych.common.arrays import F32, I64


@dataclass(frozen=True, slots=True, eq=False)
class LogprobsBatch:
    """Log-probabilities of one token a row, and of the likeliest there: as many as the row that wants most."""

    logprobs: F32  # [num_rows]
    top_ids: I64  # [num_rows, max_top], likeliest first
    top_logprobs: F32  # [num_rows, max_top]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of tokens in a row of a request; alternative j of i, likeliest first: `[i * num_top + j]`.

    Those of tokens that were asked for by name: `[i * len(asked_ids) + j]`.
    """

    logprobs: tuple[float, ...]  # natural logarithm, of the tokens themselves
    num_top: int = 0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    asked_ids: tuple[int, ...] = ()
    asked_logprobs: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.logprobs)

    def span(self, start: int, stop: int) -> TokenLogprobs:
        """Return those of tokens `[start, stop)`."""
        tops = slice(start * self.num_top, stop * self.num_top)
        asked = self.asked_logprobs[start * len(self.asked_ids) : stop * len(self.asked_ids)]
        return TokenLogprobs(
            self.logprobs[start:stop],
            self.num_top,
            self.top_ids[tops],
            self.top_logprobs[tops],
            self.asked_ids,
            asked,
        )


def join(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Return the log-probabilities of all tokens of `parts`, at least one, in order."""
    return TokenLogprobs(
        tuple(value for part in parts for value in part.logprobs),
        parts[0].num_top,
        tuple(token_id for part in parts for token_id in part.top_ids),
        tuple(value for part in parts for value in part.top_logprobs),
        *_joined_asked(parts),
    )


def _joined_asked(parts: Sequence[TokenLogprobs]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return what all of them tell of: a worker of an older version may have told nothing."""
    asked = parts[0].asked_ids
    if any(part.asked_ids != asked for part in parts):
        return (), ()
    return asked, tuple(value for part in parts for value in part.asked_logprobs)


def of_rows(batch: LogprobsBatch, start: int, stop: int, num_top: int) -> TokenLogprobs:
    """Return rows `[start, stop)` of a batch, which are consecutive tokens of one request."""
    return TokenLogprobs(
        tuple(batch.logprobs[start:stop].tolist()),
        num_top,
        tuple(batch.top_ids[start:stop, :num_top].ravel().tolist()),
        tuple(batch.top_logprobs[start:stop, :num_top].ravel().tolist()),
    )


class PromptLogprobs:
    """Collects those of a prompt's tokens behind `start`, chunk by chunk; computing a chunk again does no harm."""

    def __init__(self, prompt_len: int, num_top: int, start: int = 0) -> None:
        num_tokens = max(0, prompt_len - 1 - start)
        self.start = start  # the token there predicts the first that is scored
        self._batch = LogprobsBatch(
            np.zeros(num_tokens, dtype=np.float32),
            np.zeros((num_tokens, num_top), dtype=np.int64),
            np.zeros((num_tokens, num_top), dtype=np.float32),
        )

    @property
    def num_top(self) -> int:
        width: int = self._batch.top_ids.shape[1]
        return width

    def store(self, position: int, batch: LogprobsBatch, rows: slice) -> None:
        """Take the rows of a batch that predict the tokens from `position + 1` on, which is not before `start`."""
        mine, num_top, first = self._batch, self.num_top, position - self.start
        where = slice(first, first + rows.stop - rows.start)
        mine.logprobs[where] = batch.logprobs[rows]
        mine.top_ids[where] = batch.top_ids[rows, :num_top]
        mine.top_logprobs[where] = batch.top_logprobs[rows, :num_top]

    def all(self) -> TokenLogprobs:
        return of_rows(self._batch, 0, *self._batch.top_ids.shape)
