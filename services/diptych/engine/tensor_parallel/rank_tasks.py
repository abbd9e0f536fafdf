"""What every rank does beside the log before anything can follow from it: reading adapters, loading weights.

Rank 0 appends the task, does its own part, and waits for the others'. Whatever fails on one rank has failed: `run`
raises, with the rank's words, when all have ended, and nobody keeps what it has prepared.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import zmq

from diptych.common.errors import (
    ConfigError,
    DiptychError,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from diptych.engine.tensor_parallel.channels import Reaching
from diptych.engine.tensor_parallel.rank_log import TASKS, RankLog
from diptych.v1 import rank_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ERRORS: Final[dict[str, type[DiptychError]]] = {
    error.grpc_status: error for error in (InvalidRequest, NotFound, Overloaded, Unavailable, ConfigError)
}


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A task that every rank has done."""

    task: int
    own: T  # what rank 0 has made
    ends: Sequence[rank_pb2.TaskEnd]  # of the others


class LeadTasks:
    """Rank 0's end. One thread calls `run` at a time."""

    def __init__(self, log: RankLog) -> None:
        self.log = log
        self._numbers = itertools.count(1)

    def run(self, wanted: rank_pb2.RankTask, work: Callable[[], T]) -> Done[T]:
        """Have every rank do a task; `work` is rank 0's part. Raises what failed, of rank 0 first."""
        wanted.task = next(self._numbers)
        self.log.append(rank_pb2.RankEntry(prepare=wanted))
        try:
            own = work()
        except BaseException:
            self.log.task_ends(wanted.task)
            self.forget(wanted.task)
            raise
        ends = self.log.task_ends(wanted.task)
        failed = next((end for end in ends if end.grpc_status), None)
        if failed is not None:
            self.forget(wanted.task)
            error = _ERRORS.get(failed.grpc_status, InternalError)
            raise error(f"rank {failed.rank}: {failed.message}")
        return Done(wanted.task, own, ends)

    def forget(self, task: int) -> None:
        """Nobody wants what a task has prepared."""
        self.log.append(rank_pb2.RankEntry(forget=task))


class RankTasks:
    """Another rank's end: a thread for the work, and what it has made, by task."""

    def __init__(self, channels: Reaching, rank: int) -> None:
        self._rank = rank
        self._ends = channels.connect(zmq.PUSH, TASKS)  # only the thread uses it
        channels.wait_until_connected(rank, [self._ends])
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tasks")
        self._made: dict[int, Any] = {}

    def start(self, task: int, work: Callable[[], tuple[Any, str]]) -> None:
        """Do `work` in the thread: it returns what it has made, and its fingerprint."""
        self._pool.submit(self._do, task, work)

    def made(self, task: int) -> Any:
        """Return what a task has made that rank 0 knows to be done."""
        return self._made[task]

    def forget(self, task: int) -> Any:
        """Return what a task has made, once: None if it failed."""
        return self._made.pop(task, None)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ends.close(linger=0)

    def _do(self, task: int, work: Callable[[], tuple[Any, str]]) -> None:
        end = rank_pb2.TaskEnd(rank=self._rank, task=task)
        try:
            self._made[task], end.fingerprint = work()
        except DiptychError as error:
            end.grpc_status, end.message = error.grpc_status, str(error)
        except Exception as error:  # a bug, but rank 0 must hear of it
            logger.exception("task %d failed", task)
            end.grpc_status, end.message = InternalError.grpc_status, f"{type(error).__name__}: {error}"
        self._ends.send(end.SerializeToString())
