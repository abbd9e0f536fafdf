"""Guesses of a draft model: what they take is a pass of it for each place, so it is asked once it's known how far.

What it is expected to say is promised first, as places of which only the chances are known; the budget takes as many
as pay, and `fulfil` has them computed for all requests at once, by passes that each go one token further.

It guesses no further than the pages that a request holds: there its keys and values go meanwhile. What is written is
there again, or something else is, when the step has run that verifies the guess: that computes the draft model, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import I32
from diptych.engine.drafting.source import NO_GUESS, Guess
from diptych.engine.values.batch import DraftBatch, DraftModel, Missed
from diptych.engine.values.request import Request
from diptych.engine.values.step import Step
from diptych.generation.request_groups import OF_HEAD, OF_MODEL, OF_NEXT_LAYER

CHANCE: Final = 0.8  # of each place, where those before it come true; what comes of them corrects it
UNKNOWN: Final = -1  # a promised token
PASS_KEPT: Final = 0.8  # of what is known of the time of a pass, with each guess
FIRST_PERIOD: Final = 32  # steps without a guess, of those that could have had one, until there is a trial
LAST_PERIOD: Final = 2048
TRIAL: Final = 2  # places
FOLLOWED: Final = 2  # steps from a guess on in which the model computes what its model does
FIRST_MOST: Final = 256  # requests of which more is noted than that they are there
_MISSING_BYTES: Final = 162  # what is noted of a request, as measured with 10,000; the request itself is others'


class Wanted(NamedTuple):
    """How far to guess for a request, behind its newest token that is known."""

    request: Request
    num_tokens: int


class _Missing(NamedTuple):
    """From where on the model has not computed all of a request."""

    request: Request
    start: int  # position


class AheadSource:
    """Implements `DraftSource` by promises. Of requests it keeps what the model has missed."""

    name = OF_MODEL
    follows_all = False  # the steps: those that have no guesses, too, whoever is asked

    def __init__(self, model: DraftModel, page_table: I32, page_size: int) -> None:
        """`page_table` is that of the cache, with a row for each request."""
        self._model = model
        self._page_table = page_table
        self._page_size = page_size
        self._missed: dict[int, _Missing] = {}  # by room
        self._num_unused = FOLLOWED  # steps since it guessed last
        self._since = 0  # steps that had no guess and could have had one
        self._period = FIRST_PERIOD
        self.pass_s = 0.0  # what a pass takes; 0: not known yet, and taken to be little

    @property
    def nbytes(self) -> int:
        return len(self._missed) * _MISSING_BYTES

    def guess(self, request: Request, at_most: int) -> Guess:
        """Promise as many tokens as there is room for."""
        room = request.num_pages * self._page_size - (request.num_tokens - 1)
        count = max(0, min(at_most, room))
        return Guess((UNKNOWN,) * count, tuple(CHANCE ** (place + 1) for place in range(count)))

    def end(self, request: Request) -> None:
        """Forget what was missed of a request, whether or not it may have had guesses."""
        self._missed.pop(request.room, None)

    def row_behind(self, request: Request) -> bytes:
        """See `Drafter.row_behind`: a model that computes tokens alone needs nothing."""
        return b""

    def go_on_behind(self, request: Request, row: bytes) -> None:
        """See `Drafter.go_on_behind`."""
        return

    def rest(self) -> None:
        """Nobody will ask before some steps have been measured that it does not follow."""
        self._num_unused = FOLLOWED

    def follows(self, step: Step) -> bool:
        """Return whether the model is to compute what a step does. Until it is asked again soon, that is for nothing.

        Where it does not, it is noted what it misses. Prompts it never does: others will go on behind them.
        """
        self._num_unused += 1
        if step.chunks or self._num_unused <= FOLLOWED:
            return True
        for request in step.decodes:
            known = self._missed.get(request.room)
            if known is None or known.request is not request:
                self._missed[request.room] = _Missing(request, request.computed_len)
        return False

    def fulfil(self, wanted: Sequence[Wanted], clock: Callable[[], float]) -> list[tuple[int, ...]]:
        """Return the tokens, in the order of `wanted`, none of which is empty."""
        order = sorted(range(len(wanted)), key=lambda at: -wanted[at].num_tokens)
        batch, began_s = self._batch([wanted[at] for at in order]), clock()
        found = self._model.draft(batch)
        self._num_unused = 0
        if not batch.missed and all(request.extend_len for request, _ in wanted):  # else it did more, or waited
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
            missed=[missed for row, request in enumerate(requests) if (missed := self._take_missed(row, request))],
        )

    def _take_missed(self, row: int, request: Request) -> Missed | None:
        """Return what the model has not computed before a request's newest token; it will have."""
        known, end = self._missed.pop(request.room, None), request.num_tokens - 1
        if known is None or known.request is not request or known.start >= end:
            return None
        return Missed(row, known.start, request.tokens[known.start : end].copy(), request.cached_len)

    def _learn(self, pass_s: float) -> None:
        self.pass_s = PASS_KEPT * self.pass_s + (1 - PASS_KEPT) * pass_s if self.pass_s else pass_s


class _Computed(NamedTuple):
    """What of a request was computed here, in one go."""

    request: Request
    start: int  # position of the first token
    end: int


class NextLayerSource(AheadSource):
    """Asks the layer of a model that predicts one token more.

    It joins the hidden row before a token, which is where that was computed. So it guesses behind two tokens that were
    computed here, or behind one where the row before came with the hand-off. It can't catch up: it follows every step,
    for one layer beside all others costs little.
    """

    name = OF_NEXT_LAYER
    follows_all = True

    def __init__(self, model: DraftModel, page_table: I32, page_size: int) -> None:
        super().__init__(model, page_table, page_size)
        self._computed: dict[int, _Computed] = {}  # by room
        self._most = FIRST_MOST

    @property
    def nbytes(self) -> int:
        return len(self._computed) * _MISSING_BYTES

    def guess(self, request: Request, at_most: int) -> Guess:
        known = self._computed.get(request.room)
        if known is None or known.request is not request or request.num_tokens - 2 < known.start:
            return NO_GUESS
        return super().guess(request, at_most)

    def end(self, request: Request) -> None:
        self._computed.pop(request.room, None)

    def row_behind(self, request: Request) -> bytes:
        return self._model.row(self._slot(request, request.computed_len - 1))

    def go_on_behind(self, request: Request, row: bytes) -> None:
        if row:
            last = request.prompt_len - 1
            self._model.put_row(self._slot(request, last), row)
            self._note(request, last, 1)

    def _slot(self, request: Request, position: int) -> int:
        page, offset = divmod(position, self._page_size)
        return int(self._page_table[request.row, page]) * self._page_size + offset

    def follows(self, step: Step) -> bool:
        for request in step.decodes:
            self._note(request, request.computed_len, 1)
        for chunk in step.chunks:
            self._note(chunk.request, chunk.start, chunk.num_tokens)
        return True

    def _note(self, request: Request, start: int, num_tokens: int) -> None:
        known = self._computed.get(request.room)
        if known is not None and known.request is request and start <= known.end:
            start, num_tokens = min(start, known.start), start + num_tokens - min(start, known.start)
        self._computed[request.room] = _Computed(request, start, start + num_tokens)
        if len(self._computed) > self._most:  # of requests that ended before they could have a guess nobody tells
            self._computed = {room: each for room, each in self._computed.items() if not each.request.has_ended}
            self._most = max(FIRST_MOST, 2 * len(self._computed))


class HeadSource(NextLayerSource):
    """Asks an EAGLE head, which joins the row before a token as such a layer does."""

    name = OF_HEAD


AHEAD: Final[Mapping[str, type[AheadSource]]] = {each.name: each for each in (AheadSource, NextLayerSource, HeadSource)}
