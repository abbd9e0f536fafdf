"""One side's half of an in-process link: the actions it still has to perform, and the operations they complete."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from diptych.kvtransfer.transport import InstanceId


@dataclass(frozen=True, slots=True)
class Hello:
    """Ask the other side to pair its half with ours."""


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy our page `src` into the peer's page `dst`."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything before this has been done: send the note, if any, and complete the operation."""

    op: int
    note: bytes


@dataclass(frozen=True, slots=True)
class DeliverLate:
    """A note that was held back."""

    note: bytes


@dataclass(frozen=True, slots=True)
class Bye:
    """Tell the other side that our half is closed."""

    reason: str


Action = Hello | CopyPage | Finish | DeliverLate | Bye


@dataclass(slots=True, eq=False)
class Half:
    """Paired halves are a link that is up. A half that was closed is never opened again."""

    owner: InstanceId
    peer: InstanceId
    num_peer_pages: int
    is_open: bool = True
    partner: Half | None = None
    actions: deque[Action] = field(default_factory=deque)
    ops: list[int] = field(default_factory=list)  # not completed yet, oldest first
    bytes_sent: int = 0
