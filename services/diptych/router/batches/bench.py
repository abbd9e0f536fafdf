"""What the batches of a process are done with, and a line as it is served."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.router.batches.files import Files
from diptych.router.batches.results import Reply
from diptych.router.batches.slots import Slot, Slots
from diptych.router.batches.store import StoreCalls


class LineCall(NamedTuple):
    """A line, as it is to be served."""

    request_id: str
    tenant: str
    url: str
    body: bytes
    slot: Slot  # hears when its prompt is computed


Serve = Callable[[LineCall], Awaitable[Reply]]  # raises `Overloaded` or `Unavailable`: try it again later


@dataclass(frozen=True, slots=True)
class Bench:
    """What all batches of a process are done with."""

    store: StoreCalls
    files: Files
    slots: Slots
    serve: Serve
    clock: Callable[[], float]  # since 1970
    lease_s: float
    max_line_bytes: int
    tick_s: float  # between two writes of results, and looks whether the client has cancelled
    on_line: Callable[[str], None] = lambda outcome: None
    rng: random.Random = field(default_factory=random.Random)
    monotonic: Callable[[], float] = time.monotonic  # for what no other process hears of
