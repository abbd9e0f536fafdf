"""Says how an operation of a transport travels among others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Flow:
    """Whose transfer an operation belongs to."""

    stream: int = 0  # the room; 0: of no room
    priority: int = 0  # higher ones go first; a stream has that of its latest operation
    timeout_s: float | None = None  # then nothing more is posted, and it fails once what was posted has ended
    with_digest: bool = False  # add what is written to the stream's digest


NO_FLOW: Final = Flow()
