"""Where a request is in a prefill worker, as a table. Nothing but `PrefillRoom.on` assigns a phase.

    BOOTSTRAPPING --pages ready--> WAITING --admitted--> RUNNING --extended--> TRANSFERRING --acked--> SETTLING
          |                           |                     |                       |                     |drained
          +--------- any failure -----+---------------------+-----------------------+--> CLOSING          v
                                                                                            +--drained--> DONE

CLOSING: the client has its answer already; our page writes still in flight keep the pages, and only when they have
ended may the peer hear "no more writes".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from diptych.common.errors import moved


class Phase(enum.Enum):
    """Where a request is in a prefill worker."""

    BOOTSTRAPPING = "bootstrapping"  # waits for decode to grant pages
    WAITING = "waiting"  # has a grant; waits for pages of our own and a place in a batch
    RUNNING = "running"  # has pages; chunks are computed, and moved as they complete
    TRANSFERRING = "transferring"  # computed; the last pages and the hand-off are on the wire
    SETTLING = "settling"  # decode has everything, so it can't fail; our own news of the last writes is on its way
    CLOSING = "closing"  # failed; waits for its writes in flight
    DONE = "done"  # holds nothing


class Signal(enum.Enum):
    """What moves a request along."""

    PAGES_READY = "pages ready"
    ADMITTED = "admitted"
    EXTENDED = "extended"  # its last chunk is computed
    ACKED = "acked"  # decode has verified every page
    FAILED = "failed"  # abort, deadline, lost peer, failed write: the failure says which
    DRAINED = "drained"  # no write of ours is in flight


TRANSITIONS: Final[Mapping[tuple[Phase, Signal], Phase]] = {
    (Phase.BOOTSTRAPPING, Signal.PAGES_READY): Phase.WAITING,
    (Phase.BOOTSTRAPPING, Signal.FAILED): Phase.CLOSING,
    (Phase.WAITING, Signal.ADMITTED): Phase.RUNNING,
    (Phase.WAITING, Signal.FAILED): Phase.CLOSING,
    (Phase.RUNNING, Signal.EXTENDED): Phase.TRANSFERRING,
    (Phase.RUNNING, Signal.FAILED): Phase.CLOSING,
    (Phase.TRANSFERRING, Signal.ACKED): Phase.SETTLING,
    (Phase.TRANSFERRING, Signal.FAILED): Phase.CLOSING,
    (Phase.SETTLING, Signal.DRAINED): Phase.DONE,
    (Phase.CLOSING, Signal.DRAINED): Phase.DONE,
}


def next_phase(phase: Phase, signal: Signal) -> Phase:
    """Move along `TRANSITIONS`; raise `InvalidTransition` where it has no entry."""
    return moved(TRANSITIONS, phase, signal, "prefill")
