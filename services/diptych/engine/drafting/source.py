"""What a source of drafts is."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from diptych.engine.values.request import Request


class Guess(NamedTuple):
    """How a request may go on behind its newest token."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]  # of each: that it and all before it come true, by counts; in (0, 1], never rising


NO_GUESS: Final = Guess((), ())


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
        """Forget what belongs to a request that left; learn from its answer, for those it may be shared with."""
        ...
