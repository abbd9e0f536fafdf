"""Which few of many members link to each other, so that links do not grow with the square of their number. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from typing import Final

MOVE_LINKS: Final = 8  # as a rule, of a worker that only decodes to others that do


def neighbours(ours: int, others: Collection[int], most: int) -> set[int]:
    """Return those next to us in the ring of all by number, half of `most` on either side; all, if they are as few.

    Whoever is a neighbour of ours has us as a neighbour. Instance ids are drawn at random, so the ring is, too.
    """
    if len(others) <= most:
        return set(others)
    ring, each_side = sorted(others), most // 2
    place = bisect.bisect(ring, ours)
    return {ring[(place + step) % len(ring)] for step in range(-each_side, each_side)}
