"""Whether a line of a batch may begin: only where nobody else would notice. Pure.

Rule: nobody's request waits, at the router or for its first token; a quarter of the router's places stays free for
those that come; lines without a first token are one a worker at most, so nobody meets a queue of them; and a quarter of
some worker's KV memory is free.
"""

from __future__ import annotations

from typing import Final, NamedTuple

KEPT: Final = 0.25  # of places and of KV memory, for others


class Busy(NamedTuple):
    """What the router and its workers do now."""

    num_waiting: int  # requests in line at the router
    num_running: int  # that hold a place
    num_places: int
    num_unanswered: int  # requests of others without a first token
    num_prompts: int  # lines without one
    num_queued: int  # prompts that wait at workers, whosever
    num_prefill: int  # workers that compute prompts; 0: nothing can be served
    free_share: float  # of the KV memory of the worker with most of it
    is_cold: bool  # no workers are ready, and would be started for a request


def may_begin(busy: Busy) -> bool:
    """Return whether a line more may begin."""
    if busy.num_waiting or busy.num_unanswered:
        return False
    if busy.num_running >= (1 - KEPT) * busy.num_places:
        return False
    if busy.is_cold:
        return not busy.num_prompts  # one line waits for workers to start, as anybody's request does
    if busy.num_prompts >= busy.num_prefill or busy.num_queued > busy.num_prompts:
        return False
    return busy.free_share >= KEPT
