"""A request that runs goes on at another worker: a second attempt, to which its worker hands the KV that it has.

The worker first says in the new attempt that the request stands still, by its newest token. Only then is it known what
the prompt of the other worker's leg is. Rule: whoever gives the next token keeps the request. That is the new attempt,
or, if it comes to nothing, the old one; the other is aborted. So no token is given twice, and none is lost, whatever
happens in between. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

MIN_MOVED: Final = 2  # output tokens of an attempt, before it can move: then both of its legs have done their part
PATIENCE_S: Final = 2.0  # from the question to the new worker's first token; meanwhile the request may stand still


class Attempt(Protocol):
    """One of both attempts, as a move needs it."""

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        ...

    @property
    def ready(self) -> Sequence[int]:
        """Those of them that nobody has taken."""
        ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def has_failed(self) -> bool: ...

    def pop(self) -> Sequence[int]:
        """Take those that are ready."""
        ...

    def supersede(self) -> None:
        """Fail, behind the tokens that there are: another attempt goes on."""
        ...

    def close(self) -> None:
        """Abort what is still open."""
        ...


AnAttempt = TypeVar("AnAttempt", bound=Attempt)


class Stage(enum.Enum):
    """How far a move is."""

    ASKED = "asked"  # the worker makes tokens until no step has the request
    STILL = "still"  # it stands still; the other worker gets its KV
    OVER = "over"  # one of both attempts has the request


class Move(Generic[AnAttempt]):
    """Begins when it is made: the new attempt has the leg that asks. Call `look` when one of both has said something.

    `begin` starts the other leg, once it is known what goes before it: what the old attempt has given, of which nobody
    has taken the last tokens, and the very last is the newest. Call `give_up` after `PATIENCE_S`.
    """

    def __init__(self, old: AnAttempt, new: AnAttempt, begin: Callable[[Sequence[int]], None]) -> None:
        self._old = old
        self.new = new
        self._begin = begin
        self._stage = Stage.ASKED
        self._num_still = 0  # tokens of the old attempt when it stood still

    @property
    def is_over(self) -> bool:
        return self._stage is Stage.OVER

    def cancel(self) -> None:
        """The old attempt keeps the request. Idempotent."""
        if not self.is_over:
            self._stage = Stage.OVER
            self.new.close()

    def give_up(self) -> None:
        """It takes too long: cancel it, unless the old attempt has ended. Then `take` decides, whenever it comes."""
        if not self._old.has_ended:
            self.cancel()

    def pop(self) -> AnAttempt | None:
        """The old attempt has failed behind its last token: return who goes on behind it, if anybody does."""
        goes_on = self._stage is Stage.STILL and not self._has_gone_on and not self.new.has_failed
        if not goes_on:
            self.cancel()
            return None
        self._stage = Stage.OVER
        return self.new

    def look(self) -> None:
        """One of both attempts has said something. How it ends with an old one that has ended, `take` says."""
        if self.is_over or self._old.has_ended:
            return
        if self.new.has_failed or self._has_gone_on:
            self.cancel()
        elif self._stage is Stage.ASKED and self.new.num_tokens:
            self._stand_still()
        elif self._stage is Stage.STILL and (self.new.num_tokens > 1 or self.new.has_ended):
            self._old.supersede()

    @property
    def _has_gone_on(self) -> bool:
        return self._stage is Stage.STILL and self._old.num_tokens > self._num_still

    def _stand_still(self) -> None:
        """What is known of the output is all that the worker has made: both came over one stream."""
        self._stage, self._num_still = Stage.STILL, self._old.num_tokens
        self.new.pop()
        self._begin(self._old.ready)
