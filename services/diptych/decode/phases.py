"""Where a request is in a decode worker, as a table. Nothing but `DecodeRoom.on` assigns a phase.

    PREALLOCATING --granted--> IMPORTING --handed off--> VERIFYING --verified--> RUNNING --ended--> DONE
          |                      | |                      |  |                      ^ |retracted
          |                      | |                      |  |     ^ |       resumed| v
          |                      | |                      |  |     | |           RETRACTED --ended--> DONE
          |                      | |                      |  |     | +--given away--> MOVING --ended--> DONE
          |                      | |                      |  |     +--taken back---------+
          |                      | |                      |  +--given up--> DISCARDING --verified--> DONE
          |                      | +--given up--> CLOSING |            (whatever came out)
          |                      |                   |    +--ended (damaged)--> DONE
          |                      |                   +--writer stopped--> DONE
          +--ended--> DONE       +--ended (the writer has stopped already)--> DONE

A hand-off without a digest is verified at once. CLOSING and DISCARDING: the client has its answer already. The
pages are in quarantine until prefill says "no more writes" or provably can't write, or until we have read them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from diptych.common.errors import moved


class Phase(enum.Enum):
    """Where a request is in a decode worker."""

    __hash__ = object.__hash__  # as it is compared: Enum's own is Python

    PREALLOCATING = "preallocating"  # waits for pages, which prefill will write
    WAITING = "waiting"  # is to be computed here, all of it; waits for its grammar and for pages
    IMPORTING = "importing"  # has granted its pages to prefill
    VERIFYING = "verifying"  # prefill has written everything; it is being verified, and put together
    RUNNING = "running"  # its KV is here and verified, or being computed here; part of the running batch
    RETRACTED = "retracted"  # its KV had to give way; waits for memory, to go on here
    MOVING = "moving"  # on its way to another worker: the prefill core has its pages, and sends them
    CLOSING = "closing"  # given up while prefill may still write; pages in quarantine
    DISCARDING = "discarding"  # given up while that is done; pages in quarantine
    DONE = "done"  # holds nothing


class Signal(enum.Enum):
    """What moves a request along."""

    __hash__ = object.__hash__

    GRANTED = "granted"
    ADMITTED = "admitted"  # has pages of its own
    HANDED_OFF = "handed off"  # every page has landed
    VERIFIED = "verified"  # or that is not wanted; the pages are whole
    RETRACTED = "retracted"
    RESUMED = "resumed"  # it has pages again
    GIVEN_AWAY = "given away"  # held, and no step has it any more
    TAKEN_BACK = "taken back"  # the other worker does not go on with it
    GIVEN_UP = "given up"  # abort, deadline or lost link while somebody uses the pages
    WRITER_STOPPED = "writer stopped"  # prefill said so, or is provably gone
    ENDED = "ended"  # finished or failed, and nobody can write into its pages


TRANSITIONS: Final[Mapping[tuple[Phase, Signal], Phase]] = {
    (Phase.PREALLOCATING, Signal.GRANTED): Phase.IMPORTING,
    (Phase.PREALLOCATING, Signal.ENDED): Phase.DONE,
    (Phase.WAITING, Signal.ADMITTED): Phase.RUNNING,
    (Phase.WAITING, Signal.ENDED): Phase.DONE,
    (Phase.IMPORTING, Signal.HANDED_OFF): Phase.VERIFYING,
    (Phase.IMPORTING, Signal.GIVEN_UP): Phase.CLOSING,
    (Phase.IMPORTING, Signal.ENDED): Phase.DONE,
    (Phase.VERIFYING, Signal.VERIFIED): Phase.RUNNING,
    (Phase.VERIFYING, Signal.GIVEN_UP): Phase.DISCARDING,
    (Phase.VERIFYING, Signal.ENDED): Phase.DONE,
    (Phase.RUNNING, Signal.RETRACTED): Phase.RETRACTED,
    (Phase.RUNNING, Signal.ENDED): Phase.DONE,
    (Phase.RETRACTED, Signal.RESUMED): Phase.RUNNING,
    (Phase.RETRACTED, Signal.ENDED): Phase.DONE,
    (Phase.RUNNING, Signal.GIVEN_AWAY): Phase.MOVING,
    (Phase.MOVING, Signal.TAKEN_BACK): Phase.RUNNING,
    (Phase.MOVING, Signal.ENDED): Phase.DONE,
    (Phase.CLOSING, Signal.WRITER_STOPPED): Phase.DONE,
    (Phase.DISCARDING, Signal.VERIFIED): Phase.DONE,
}


def next_phase(phase: Phase, signal: Signal) -> Phase:
    """Move along `TRANSITIONS`; raise `InvalidTransition` where it has no entry."""
    return moved(TRANSITIONS, phase, signal, "decode")
