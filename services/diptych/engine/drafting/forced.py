"""Guesses that a grammar's text comes where it can't be otherwise: names of a schema's properties, most of all.

It is spelled as the tokenizer spells it. A mask allows all spellings of it, and the model may choose another.
Elsewhere this is known as jump-forward decoding (SGLang, 2024); here such a token is a guess like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from diptych.common.arrays import I64
from diptych.engine.drafting.source import NO_GUESS, Guess
from diptych.engine.values.request import Request

CHANCE: Final = 0.95  # that a forced token comes behind one: models seldom spell otherwise than they have read


@dataclass(slots=True)
class _Life:
    text: I64
    forced: Sequence[int] = ()  # behind `seen` tokens
    seen: int = 0

    def rest(self, num_tokens: int) -> Sequence[int]:
        """Return what is forced still behind so many tokens; nothing if others came, or no more is known."""
        num_new = num_tokens - self.seen
        if 0 <= num_new < len(self.forced) and self.text[self.seen : num_tokens].tolist() == [*self.forced[:num_new]]:
            return self.forced[num_new:]
        return ()


class ForcedSource:
    """Implements `DraftSource`: for requests with a grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size  # the tokenizer may have tokens that the model lacks
        self._lives: dict[int, _Life] = {}  # by room

    @property
    def nbytes(self) -> int:
        return sum(8 * len(life.forced) for life in self._lives.values())

    def guess(self, request: Request, at_most: int) -> Guess:
        """A grammar's matcher has taken the tokens that the request has."""
        if request.matcher is None:
            return NO_GUESS
        life = self._lives.get(request.room)
        if life is None or life.text is not request.tokens:
            life = self._lives[request.room] = _Life(request.tokens)
        life.forced = life.rest(request.num_tokens) or request.matcher.forced()
        life.seen = request.num_tokens
        token_ids = tuple(takewhile(lambda token: token < self._vocab_size, life.forced[:at_most]))
        return Guess(token_ids, tuple([CHANCE**k for k in range(1, len(token_ids) + 1)]))

    def end(self, request: Request) -> None:
        self._lives.pop(request.room, None)
