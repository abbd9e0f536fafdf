"""How many requests miss an SLO, by the share of it that they are expected to take. Pure."""

from __future__ import annotations

from typing import Final

UNSURE: Final = 0.1  # of an SLO: within so much of it nobody knows whether it will be kept
CLOSE: Final = 0.03  # the same of a time per token: what else comes to the worker is chosen, too
LATE: Final = 0.1  # what being late by a whole SLO more costs, once it is missed: less than another's miss
SOON: Final = 0.05  # what it is worth to take none of an SLO, not all


def missed(share: float, unsure: float = UNSURE) -> float:
    """Return how many requests miss an SLO of which they take such a share: none up to one, and a little more if late.

    Nobody knows what comes of those that take nearly all of it, or hardly more.
    """
    likely = min(1.0, max(0.0, (share - 1 + unsure) / (2 * unsure)))
    return likely + LATE * max(0.0, share - 1 - unsure)
