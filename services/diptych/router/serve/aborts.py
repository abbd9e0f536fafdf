"""Calls that run, by the ids that clients know them by, so that somebody else than their clients can end them.

A call that is aborted is cancelled where it waits, in line or for a token, as if its client had left; but its client is
there, and gets `Aborted`. This is the rule of `asyncio.timeout`, with a request in the place of a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diptych.router.errors import Aborted
from diptych.router.values.request import CallState


@dataclass(slots=True, eq=False)
class _Call:
    names: Collection[str]
    owner: str  # the key's name; empty: there are none
    task: asyncio.Task[Any]
    state: CallState

    def abort(self) -> bool:
        """Return whether it was not aborted before."""
        if self.state.is_aborted:
            return False
        self.state.is_aborted = True
        self.task.cancel()
        return True


class Aborts:
    """The calls of one process."""

    def __init__(self) -> None:
        self._calls: dict[_Call, None] = {}

    @contextmanager
    def abortable(self, names: Collection[str], owner: str, state: CallState) -> Generator[None, None, None]:
        """Inside, the current task's work can be aborted by any of these names: `state` has it noted before it ends.

        Raises `Aborted` if it was.
        """
        task = asyncio.current_task()
        assert task is not None, "work is aborted by its task"
        call, before = _Call(names, owner, task, state), task.cancelling()
        self._calls[call] = None
        try:
            yield
        except asyncio.CancelledError:
            if state.is_aborted and task.uncancel() <= before:
                raise Aborted("the request was aborted by its id") from None
            raise
        finally:
            del self._calls[call]

    def abort(self, name: str, owner: str | None) -> int:
        """End the calls that have this name, of one owner, or of all (None); return how many those were."""
        return sum(call.abort() for call in self._of(owner) if name in call.names)

    def abort_all(self, owner: str | None) -> int:
        """End all calls of one owner, or of all."""
        return sum(call.abort() for call in self._of(owner))

    def _of(self, owner: str | None) -> list[_Call]:
        return [call for call in self._calls if owner is None or call.owner == owner]
