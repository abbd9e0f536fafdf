"""One pull of a cached prefix: where it is, as a table, and what waits for it. Nothing but `Pull.on` assigns a phase.

    ASKED --written--> VERIFYING --ended--> DONE
      | |
      | +--given up--> CLOSING --ended--> DONE
      +--ended (refused)--> DONE

The pages of one that is CLOSING are in quarantine until its writer has said that it writes no more, or provably can't.
Those of one that is VERIFYING are read, and nobody writes them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from diptych.common.errors import moved
from diptych.engine.cache.peer_pages import Arriving
from diptych.engine.cache.tree.radix_node import NO_PAGES
from diptych.kvtransfer.ownership import Pages

_ID_MASK: Final = 0xA5C3_96E1_5A3C_691E


class Phase(enum.Enum):
    """Where a pull is."""

    ASKED = "asked"  # the holder may write
    VERIFYING = "verifying"  # it has written, and its pages are being verified, or put together
    CLOSING = "closing"  # nobody waits for it any more, and the holder may still write
    DONE = "done"  # holds nothing


class Signal(enum.Enum):
    """What moves a pull along."""

    WRITTEN = "written"  # the holder says so, and that it writes no more
    GIVEN_UP = "given up"  # too late, or the link is lost
    ENDED = "ended"  # its pages are in the tree, or free


TRANSITIONS: Final[Mapping[tuple[Phase, Signal], Phase]] = {
    (Phase.ASKED, Signal.WRITTEN): Phase.VERIFYING,
    (Phase.ASKED, Signal.GIVEN_UP): Phase.CLOSING,
    (Phase.ASKED, Signal.ENDED): Phase.DONE,
    (Phase.VERIFYING, Signal.ENDED): Phase.DONE,
    (Phase.CLOSING, Signal.ENDED): Phase.DONE,
}


def pull_id(room: int) -> int:
    """Return the number of a request's pull, which names it where rooms are named, and is no room.

    Rooms are drawn at random, by the router. A room may have one of itself at the holder: the other leg.
    """
    return (room ^ _ID_MASK) or 1


@dataclass(slots=True, eq=False)
class Pull:
    """Implements `Reason` for those who wait for its pages."""

    id: int
    peer: int  # who has the prefix
    arriving: Arriving
    generations: tuple[int, ...]
    names: Sequence[int]  # of the pages of the whole prefix
    began_s: float
    deadline_s: float
    compute_s: float  # that it takes to compute the same; infinite: not known
    num_bytes: int
    bytes_before: int  # of other pulls from the same peer, when it began
    has_rows: bool = False  # of an image, and no KV
    is_offered: bool = False  # by who has it: he waits to hear what came of it
    is_hurried: bool = False  # its offer's time is over before one would lose patience: missing that is nobody's fault
    phase: Phase = Phase.ASKED
    num_pages: int = 0  # of tokens, that were written
    written: Pages = field(default_factory=NO_PAGES.copy)  # those, and the ones of windows
    digest: int | None = None  # of all that was, as its writer says
    given_up_s: float = math.inf
    asked_s: float = 0.0  # CLOSING: when its writer was last asked to stop

    def on(self, signal: Signal) -> None:
        """Move along `TRANSITIONS`; raise `InvalidTransition` where it has no entry."""
        self.phase = moved(TRANSITIONS, self.phase, signal, "a pull")

    @property
    def is_coming(self) -> bool:
        return self.phase in (Phase.ASKED, Phase.VERIFYING)

    @property
    def until_s(self) -> float:
        return self.deadline_s if self.phase is Phase.ASKED else math.inf

    def is_over(self, now_s: float) -> bool:
        return not self.is_coming or now_s >= self.until_s

    def brings(self, names: Sequence[int]) -> int:
        """Return how many pages of a prefix of these names are here when it has come: 0 if none of its own are."""
        count = min(len(names), len(self.names))
        return count if count > self.arriving.first_page and names[count - 1] == self.names[count - 1] else 0
