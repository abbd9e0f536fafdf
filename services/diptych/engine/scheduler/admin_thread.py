"""Does what an operator changes on a running scheduler: prepared on a thread, put into effect by its loop.

One command at a time, in the order asked for; but those that wait for what the loop does have threads of their own, so
that the others needn't wait for it. A command whose preparation or effect raises has changed nothing, and is
answered with the error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final

from diptych.common.errors import DiptychError, InternalError
from diptych.v1.admin_pb2 import AdminAnswer, AdminCommand

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 4  # commands at a time; others wait for them

Effect = Callable[[], AdminAnswer]  # runs on the scheduler's thread; the answer needs no `query`
Handler = Callable[[AdminCommand], Effect]  # prepares; runs on the admin thread


class AdminThread:
    """Owns the threads. All calls from the scheduler's thread."""

    def __init__(self, handlers: Mapping[str, Handler], waiting: Mapping[str, Handler] | None = None) -> None:
        """Handlers go by the name of the command's field in `AdminCommand`; those of `waiting` may take long."""
        self._waiting = dict(waiting or {})
        self._handlers = {**handlers, **self._waiting}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="admin")
        self._waiting_pool = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="admin-waiting")
        self._prepared: SimpleQueue[tuple[int, Effect]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)  # counts `_prepared`

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do."""
        return self._wake

    def submit(self, command: AdminCommand) -> None:
        """Answer by what `poll` returns some time later."""
        waits = command.WhichOneof("command") in self._waiting
        (self._waiting_pool if waits else self._pool).submit(self._prepare, command)

    def poll(self) -> list[AdminAnswer]:
        """Put into effect what has been prepared since the last call; return the answers."""
        answers = []
        while not self._prepared.empty():
            os.eventfd_read(self._wake)
            answers.append(_answer(*self._prepared.get()))
        return answers

    def close(self) -> None:
        """Wait for what is being prepared, and drop the rest."""
        for pool in (self._pool, self._waiting_pool):
            pool.shutdown(cancel_futures=True)
        os.close(self._wake)

    def _prepare(self, command: AdminCommand) -> None:
        try:
            effect = self._handlers[str(command.WhichOneof("command"))](command)
        except DiptychError as error:
            effect = _refusal(error)
        except Exception as error:  # a bug, but the command must be answered
            logger.exception("an admin command failed")
            effect = _refusal(InternalError(f"{type(error).__name__}: {error}"))
        os.eventfd_write(self._wake, 1)  # first: the count may be above what is in the queue, never below
        self._prepared.put((command.query, effect))


def _answer(query: int, effect: Effect) -> AdminAnswer:
    try:
        answer = effect()
    except DiptychError as error:
        answer = _refusal(error)()
    answer.query = query
    return answer


def _refusal(error: DiptychError) -> Effect:
    message = str(error)
    return lambda: AdminAnswer(grpc_status=error.grpc_status, message=message)
