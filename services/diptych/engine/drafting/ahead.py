"""Guesses of a draft model: what they take is a pass of it for each place, so it is asked once it's known how far.

What it is expected to say is promised first, as places of which only the chances are known; the budget takes as many
as pay, and `fulfil` has them computed for all requests at once, by passes that each go one token further.

It guesses no further than the pages that a request holds: there its keys and values go meanwhile. What is written is
there again, or something else is, when the step has run that verifies the guess: that computes the draft model, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.drafting.source import Guess
from diptych.engine.values.batch import DraftBatch, DraftModel
from diptych.engine.values.request import Request

CHANCE: Final = 0.8  # of each place, where those before it come true; what comes of them corrects it
UNKNOWN: Final = -1  # a promised token
PASS_KEPT: Final = 0.8  # of what is known of the time of a pass, with each guess
FIRST_PERIOD: Final = 32  # steps without a guess, of those that could have had one, until there is a trial
LAST_PERIOD: Final = 2048
TRIAL: Final = 3  # places


class Wanted(NamedTuple):
    """How far to guess for a request, behind its newest token that is known."""

    request: Request
    num_tokens: int


class AheadSource:
    """Implements `DraftSource` by promises. It keeps nothing of requests."""

    nbytes = 0

    def __init__(self, model: DraftModel, page_table: I32, page_size: int) -> None:
        """`page_table` is that of the cache, with a row for each request."""
        self._model = model
        self._page_table = page_table
        self._page_size = page_size
        self._since = 0  # steps that had no guess and could have had one
        self._period = FIRST_PERIOD
        self.pass_s = 0.0  # what a pass takes; 0: not known yet, and taken to be little

    def guess(self, request: Request, at_most: int) -> Guess:
        """Promise as many tokens as there is room for."""
        room = request.num_pages * self._page_size - (request.num_tokens - 1)
        count = max(0, min(at_most, room))
        return Guess((UNKNOWN,) * count, tuple(CHANCE ** (place + 1) for place in range(count)))

    def end(self, request: Request) -> None:
        """Nothing is kept of it."""

    def fulfil(self, wanted: Sequence[Wanted], clock: Callable[[], float]) -> list[tuple[int, ...]]:
        """Return the tokens, in the order of `wanted`, none of which is empty."""
        order = sorted(range(len(wanted)), key=lambda at: -wanted[at].num_tokens)
        batch, began_s = self._batch([wanted[at] for at in order]), clock()
        found = self._model.draft(batch)
        if all(request.extend_len for request, _ in wanted):  # else it has waited for a step, too
            self._learn((clock() - began_s) / batch.most)
        token_ids = dict(zip(order, found.tolist(), strict=True))
        return [tuple(token_ids[at][: each.num_tokens]) for at, each in enumerate(wanted)]

    def trial(self, has_guesses: bool) -> int:
        """Return how many tokens to guess although it does not seem to pay, in a step that could have guesses."""
        if has_guesses:
            self._since, self._period = 0, FIRST_PERIOD
            return 0
        self._since += 1
        if self._since < self._period:
            return 0
        self._since, self._period = 0, min(LAST_PERIOD, 2 * self._period)
        return TRIAL

    def _batch(self, wanted: Sequence[Wanted]) -> DraftBatch:
        requests = [request for request, _ in wanted]
        rows = np.array([request.row for request in requests], dtype=np.int64)
        positions = np.array([request.num_tokens - 1 for request in requests], dtype=np.int64)
        return DraftBatch(
            token_ids=np.array([request.tokens.item(request.num_tokens - 1) for request in requests], dtype=np.int64),
            positions=positions,
            page_table=self._page_table[rows, : max(request.num_pages for request in requests)],
            num_drafts=np.array([num_tokens for _, num_tokens in wanted], dtype=np.int64),
            page_size=self._page_size,
        )

    def _learn(self, pass_s: float) -> None:
        self.pass_s = PASS_KEPT * self.pass_s + (1 - PASS_KEPT) * pass_s if self.pass_s else pass_s
