"""Guesses that a request's output is what its client predicted: most of a file, say, of which little is to change.

Where an output leaves the prediction, the place where it comes back is looked for by its last tokens, near where it
left. The field is OpenAI's: https://platform.openai.com/docs/guides/predicted-outputs.

Of a prediction as much is kept as the output may have, and some that it may leave out. All that is kept has a limit in
bytes: a request for which there is no room gets no guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.common.arrays import I64
from diptych.engine.drafting.lookup import MAX_MATCH, places_behind
from diptych.engine.drafting.source import NO_GUESS, Guess, going_on
from diptych.engine.values.request import Request
from diptych.tokens.packed_tokens import TOKEN_BYTES

FIRST_MATCH: Final = 4  # an output begins as if so many tokens had come as predicted
NEAR: Final = 64  # tokens: a single one that is the same says where to go on, if it is as near
MAX_LEFT_OUT: Final = 4096  # tokens of a prediction, beyond as many as the output may have
MAX_BYTES: Final = 64 * 2**20
MAX_READ: Final = 256  # tokens of output that are followed one by one; behind more, the place is looked for


@dataclass(slots=True)
class _Life:
    """How far a request's output has come in its prediction."""

    text: I64
    prediction: I64
    begin: int  # of the output, in the text
    seen: int  # tokens of the text
    at: int = 0  # the prediction's token that is next
    match: int = FIRST_MATCH  # so many tokens before it are the output's; 0: it is lost

    def see(self, num_tokens: int) -> None:
        new = self.text[self.seen : num_tokens].tolist() if num_tokens - self.seen <= MAX_READ else []
        expected = self.prediction[self.at : self.at + len(new)].tolist()
        if new and new == expected:
            self.match += len(new)
        elif num_tokens > self.seen:
            self.match = 0
        self.at += num_tokens - self.seen
        self.seen = num_tokens
        if not self.match:
            self._look()

    def _look(self) -> None:
        """Go on where the output's last tokens stand; of several places at the nearest to where it would be."""
        end = self.text[max(self.begin, self.seen - MAX_MATCH) : self.seen]
        if not len(end):
            return
        places, match = places_behind(self.prediction, end, self.at)
        if match:
            nearest = int(places[np.abs(places - self.at).argmin()])
            if match > 1 or abs(nearest - self.at) <= NEAR:
                self.at, self.match = nearest, match


class PredictedSource:
    """Implements `DraftSource`: for requests that came with a prediction."""

    def __init__(self, vocab_size: int, max_bytes: int = MAX_BYTES) -> None:
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._lives: dict[int, _Life] = {}  # by room

    @property
    def nbytes(self) -> int:
        return sum(life.prediction.nbytes for life in self._lives.values())

    def guess(self, request: Request, at_most: int) -> Guess:
        if not request.hints.prediction:
            return NO_GUESS
        life = self._lives.get(request.room)
        if life is None or life.text is not request.tokens or life.seen > request.num_tokens:
            self._lives.pop(request.room, None)
            life = self._lives[request.room] = self._begin(request)
        life.see(request.num_tokens)
        if not life.match:
            return NO_GUESS
        return going_on(life.prediction[life.at : life.at + at_most].tolist(), life.match)

    def end(self, request: Request) -> None:
        self._lives.pop(request.room, None)

    def _begin(self, request: Request) -> _Life:
        begin = request.prompt_len - request.num_prior_output_tokens
        return _Life(request.tokens, self._prediction(request, request.max_len - begin + MAX_LEFT_OUT), begin, begin)

    def _prediction(self, request: Request, at_most: int) -> I64:
        """Return the prediction's first tokens, up to one that the model lacks; none where there is no room."""
        packed = request.hints.prediction
        tokens = np.frombuffer(packed, np.uint32, len(packed) // TOKEN_BYTES)[:at_most]
        beyond = np.flatnonzero(tokens >= self._vocab_size)
        prediction = (tokens[: beyond[0]] if len(beyond) else tokens).astype(np.int64)
        return prediction if self.nbytes + prediction.nbytes <= self._max_bytes else prediction[:0].copy()
