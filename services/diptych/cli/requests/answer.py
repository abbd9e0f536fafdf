"""Holds what a member answers about itself."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.worker_pb2 import Drain, WorkerStatus


@dataclass(frozen=True, slots=True)
class Answer:
    """A member's record, newest first hand, and what it adds to it."""

    member: Instance
    status: WorkerStatus | None = None  # present if it is a worker and answers
    drain: Drain | None = None  # while it drains
    problem: str = ""  # why it does not answer
    is_gone: bool = False  # known to be, as silence alone says little: another has its address, or nobody lists it
