"""What a source of drafts is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from diptych.engine.values.request import Request


class Guess(NamedTuple):
    """How a request may go on behind its newest token."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]  # of each: that it and all before it come true, by counts; in (0, 1], never rising


NO_GUESS: Final = Guess((), ())


def going_on(token_ids: Sequence[int], match: int) -> Guess:
    """Return a guess by one place where a text was the same in `match` tokens, and went on with these.

    How long texts agree follows a power law, of exponent 1: of those that agree in `match` tokens, a share of
    `match / (match + k)` agree in `k` more. Found on code, JSON, quotes and prose, not derived.
    """
    return Guess(tuple(token_ids), tuple([match / (match + k) for k in range(1, len(token_ids) + 1)]))


class DraftSource(Protocol):
    """Guesses by one idea. It keeps what it needs of a request by its room, and follows the tokens that it is shown.

    A room may come with fewer tokens than last time, or with others: then it is a new request, or a new life of one.
    """

    @property
    def nbytes(self) -> int:
        """What it holds, as far as it grows with tokens; its constructor bounds it."""
        ...

    def guess(self, request: Request, at_most: int) -> Guess:
        """Return at most so many tokens that may follow `tokens[:num_tokens]`; `NO_GUESS` if it has no idea."""
        ...

    def end(self, request: Request) -> None:
        """Forget what belongs to a request that left; learn from its answer, for those it may be shared with.

        It is called for requests that may have guesses of this source, and no others.
        """
        ...
