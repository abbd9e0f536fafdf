"""A request that runs goes on at another worker: a second attempt, to which its worker hands the KV that it has.

The worker first says in the new attempt that the request stands still, by its newest token. Only then is it known what
the prompt of the other worker's leg is. Rule: whoever gives the next token keeps the request. That is the new attempt,
or, if it comes to nothing, the old one; the other is aborted. So no token is given twice, and none is lost, whatever
happens in between.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Final

from diptych.router.serve.attempt import Attempt

PATIENCE_S: Final = 2.0  # from the question to the new worker's first token; meanwhile the request may stand still


class Stage(enum.Enum):
    """How far a move is."""

    ASKED = "asked"  # the worker makes tokens until no step has the request
    STILL = "still"  # it stands still; the other worker gets its KV
    OVER = "over"  # one of both attempts has the request


class Move:
    """Began when it is made: the new attempt has the leg that asks. `begin` starts the other one, once it is known.

    It gets all tokens that the old attempt has given and nobody has taken, of which the last one is the newest.
    """

    def __init__(self, old: Attempt, new: Attempt, begin: Callable[[Sequence[int]], None]) -> None:
        self._old = old
        self.new = new
        self._begin = begin
        self._stage = Stage.ASKED
        self._num_still = 0  # tokens of the old attempt when it stood still
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.cancel)
        old.watch(self._look)
        new.watch(self._look)

    @property
    def is_over(self) -> bool:
        return self._stage is Stage.OVER

    def cancel(self) -> None:
        """The old attempt keeps the request. Idempotent."""
        if not self.is_over:
            self._end()
            self.new.close()

    def take(self) -> Attempt | None:
        """The old attempt has failed behind its last token: return who goes on behind it, if anybody does."""
        goes_on = self._stage is Stage.STILL and self._old.num_tokens == self._num_still and not self.new.has_failed
        if not goes_on:
            self.cancel()
            return None
        self._end()
        return self.new

    def _look(self) -> None:
        """One of both attempts has said something. What has ended is the request's own task's business."""
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

    def _end(self) -> None:
        self._stage = Stage.OVER
        self._timer.cancel()
        for attempt in (self._old, self.new):
            attempt.watch(_nobody)


def _nobody() -> None:
    """Nobody hears of it any more."""
