"""Second attempts beside first ones that are slow to answer: whoever answers first serves, the other is aborted.

Off unless configured: it buys the slowest first tokens for work that is done twice. So that it can't double the load of
workers that are slow because they are busy, only a share of all requests may have a second attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from diptych.router.serve.attempt import Attempt, AttemptFailed
from diptych.router.values.failure import LegFailure
from diptych.router.values.leg_results import Delta

SHARE: Final = 0.05  # of requests that may have a second attempt
MAX_SAVED: Final = 10.0  # second attempts, from times when none were needed


class Hedging:
    """When a second attempt begins, and whether it may."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s  # without a first token; 0: never
        self._saved = 1.0

    @property
    def is_on(self) -> bool:
        return self.after_s > 0

    def count(self) -> None:
        """A request begins."""
        self._saved = min(MAX_SAVED, self._saved + SHARE)

    def spend(self) -> bool:
        """Return whether one more second attempt may begin, and count it."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


async def first_answer(
    first: Attempt,
    after_s: float,
    start_second: Callable[[], Awaitable[Attempt | None]],
    lose: Callable[[Attempt, LegFailure], None],
) -> tuple[Attempt, Delta | AttemptFailed]:
    """Return who answers first, and what; a failure only when nobody else is left. The others are aborted.

    Who fails while another goes on is told to `lose`. If it is cancelled, all are aborted.
    """
    attempts = [first]

    async def begin_second() -> Attempt | None:
        second = await start_second()
        attempts.extend([second] if second else [])
        return second

    try:
        return await _first_of(first, after_s, begin_second, lose)
    except asyncio.CancelledError:  # perhaps while the others end: who has answered is nobody's then
        for attempt in attempts:
            attempt.close()
        raise


async def _first_of(
    first: Attempt,
    after_s: float,
    start_second: Callable[[], Awaitable[Attempt | None]],
    lose: Callable[[Attempt, LegFailure], None],
) -> tuple[Attempt, Delta | AttemptFailed]:
    runners = {asyncio.create_task(first.next()): first}
    try:
        done, _ = await asyncio.wait(runners, timeout=after_s)
        if not done and (second := await start_second()):
            runners[asyncio.create_task(second.next())] = second
        while True:
            done, _ = await asyncio.wait(runners, return_when=asyncio.FIRST_COMPLETED)
            task = done.pop()
            attempt, outcome = runners.pop(task), _outcome(task)
            if not (isinstance(outcome, AttemptFailed) and runners):
                return attempt, outcome
            lose(attempt, outcome.failure)
    finally:
        for task, attempt in runners.items():
            task.cancel()
            attempt.close()
        await asyncio.gather(*runners, return_exceptions=True)  # one may have failed in the same moment


def _outcome(task: asyncio.Task[Delta]) -> Delta | AttemptFailed:
    try:
        return task.result()
    except AttemptFailed as failed:
        return failed
