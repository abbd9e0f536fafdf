"""All of a router that is about batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.router.batches.files import Files
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.runner import BatchRunner
from diptych.router.batches.store import StoreCalls


@dataclass(frozen=True, slots=True)
class Batches:
    """What its parts need."""

    store: StoreCalls
    files: Files
    jobs: Jobs
    runner: BatchRunner
    clock: Callable[[], float]  # since 1970
    max_file_bytes: int
    stall_s: float  # that an upload may stand still
