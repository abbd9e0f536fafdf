"""What a pull is expected to take, by the speed of its link and by how earlier ones came; and from whom none is wanted.

A holder answers between two of its steps, so a pull takes longer than its bytes alone; how much is learned for each
peer, as a ratio. One that kept nobody's time, or sent wrong bytes, is left alone for a while. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

UNTESTED_BYTES_PER_S: Final = 1e9  # of a link
LATENCY_S: Final = 0.003  # of a pull beside its bytes, before any has been measured
KEPT: Final = 0.7  # of what is known when a pull has been measured
OUTLIER: Final = 30.0  # times what was expected: more than this is not learned at once
PATIENCE: Final = 4.0  # times what is expected is waited
MIN_PATIENCE_S: Final = 0.5  # and this in any case: a step of the holder may be in the way
MISSED_S: Final = 5.0  # that a peer is left alone which kept no time
WRONG_S: Final = 60.0  # or whose bytes were wrong


@dataclass(slots=True)
class _Peer:
    bytes_per_s: float
    ratio: float = 1.0  # of what pulls took to what the test of the link lets expect
    queued_bytes: int = 0  # of pulls that are under way
    shunned_until_s: float = -math.inf


class PullPrices:
    """Of all peers that are linked, and of those that were."""

    def __init__(self) -> None:
        self._peers: dict[int, _Peer] = {}

    def linked(self, peer: int, bytes_per_s: float) -> None:
        """A link to a peer is up, whose test found that speed; 0: it did not measure."""
        known = self._peers.setdefault(peer, _Peer(0.0))
        known.bytes_per_s = bytes_per_s or UNTESTED_BYTES_PER_S

    def is_shunned(self, peer: int, now_s: float) -> bool:
        return now_s < self._peers[peer].shunned_until_s

    def load_s(self, peer: int, num_bytes: int) -> float:
        """Return how long a pull takes that begins now."""
        return self._expected_s(peer, self._peers[peer].queued_bytes + num_bytes)

    @staticmethod
    def patience_s(load_s: float) -> float:
        """Return how long one is waited for that is expected to take so long."""
        return MIN_PATIENCE_S + PATIENCE * load_s

    def began(self, peer: int, num_bytes: int) -> None:
        self._peers[peer].queued_bytes += num_bytes

    def ended(self, peer: int, num_bytes: int) -> None:
        self._peers[peer].queued_bytes -= num_bytes

    def came(self, peer: int, num_bytes: int, took_s: float) -> None:
        """A pull took so long."""
        known, expected_s = self._peers[peer], self._expected_s(peer, num_bytes)
        ratio = known.ratio * min(took_s / expected_s, OUTLIER)
        known.ratio = KEPT * known.ratio + (1 - KEPT) * ratio

    def missed(self, peer: int, now_s: float) -> None:
        """A pull did not come in time."""
        self._peers[peer].shunned_until_s = now_s + MISSED_S

    def was_wrong(self, peer: int, now_s: float) -> None:
        """What came was not what was sent."""
        self._peers[peer].shunned_until_s = now_s + WRONG_S

    def _expected_s(self, peer: int, num_bytes: int) -> float:
        known = self._peers[peer]
        return known.ratio * (LATENCY_S + num_bytes / known.bytes_per_s)
