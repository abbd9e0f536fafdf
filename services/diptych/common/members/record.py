"""What an instance says of itself, as everybody who keeps or merges it sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P")


class State(enum.IntEnum):
    """What an instance announces. It only ever moves forward; the numbers are those of the protocol."""

    STARTING = 1  # registered, not yet able to serve
    READY = 2
    DRAINING = 3  # finishes what it has, takes nothing new
    GONE = 4  # said goodbye


@dataclass(frozen=True, slots=True)
class Record(Generic[P]):
    """What an instance says of itself. Two are equal when they say the same, whenever they were said."""

    instance_id: int  # random, never 0, new at every start
    address: str  # host:port, or host:port#rank; belongs to the instance there that was started last
    state: State
    payload: P  # everything else
    started_ns: int = 0  # start, on the clock of its machine; 0: not known
    sequence: int = field(default=0, compare=False)  # strictly rising within an instance
    load: bytes = field(default=b"", compare=False)  # how busy it is; bootstrap keeps it apart from `payload`
