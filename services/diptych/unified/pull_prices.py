"""What a pull is expected to take, by the speed of its link and by how earlier ones came; and from whom none is wanted.

A holder answers between two of its steps, so a pull takes longer than its bytes alone; how much is learned for each
peer, as a ratio to what its link takes for the pull and those before it. From a peer that became dear nothing is
pulled, so nothing is learned of it: what is known fades, and a link that is tested anew begins anew. One that kept
nobody's time, or sent wrong bytes, is left alone for a while. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

UNTESTED_BYTES_PER_S: Final = 1e9  # of a link
LATENCY_S: Final = 0.003  # of a pull beside its bytes, before any has been measured
KEPT: Final = 0.7  # of what is known when a pull has been measured
OUTLIER: Final = 30.0  # times what its link takes: more than this is not learned
HALF_LIFE_S: Final = 30.0  # of what was learned
PATIENCE: Final = 4.0  # times what is expected is waited
MIN_PATIENCE_S: Final = 0.5  # and this in any case: a step of the holder may be in the way
ROWS_PATIENCE_S: Final = 5.0  # this for rows of images: a step of their holder encodes images, as we would else
MISSED_S: Final = 5.0  # that a peer is left alone which kept no time
WRONG_S: Final = 60.0  # or whose bytes were wrong


@dataclass(slots=True)
class _Peer:
    bytes_per_s: float
    ratio: float = 1.0  # of what pulls took to what the test of the link lets expect, when it was learned
    learned_s: float = 0.0
    queued_bytes: int = 0  # of pulls that are under way
    shunned_until_s: float = -math.inf


class PullPrices:
    """Knows the prices of all peers that are linked, and of those that were until `keep`."""

    def __init__(self) -> None:
        self._peers: dict[int, _Peer] = {}

    def linked(self, peer: int, bytes_per_s: float) -> None:
        """A link to a peer is up, whose test found that speed; 0: it did not measure."""
        known = self._peers.setdefault(peer, _Peer(0.0))
        known.bytes_per_s, known.ratio = bytes_per_s or UNTESTED_BYTES_PER_S, 1.0

    def keep(self, peers: Set[int], now_s: float) -> None:
        """Forget all others, but for those that are left alone now."""
        self._peers = {
            peer: known for peer, known in self._peers.items() if peer in peers or now_s < known.shunned_until_s
        }

    def is_shunned(self, peer: int, now_s: float) -> bool:
        return now_s < self._peers[peer].shunned_until_s

    def load_s(self, peer: int, num_bytes: int, now_s: float) -> float:
        """Return how long a pull takes that begins now."""
        return self._ratio(peer, now_s) * self._link_s(peer, self._peers[peer].queued_bytes + num_bytes)

    @staticmethod
    def patience_s(load_s: float, least_s: float) -> float:
        """Return how long one is waited for that is expected to take so long."""
        return least_s + PATIENCE * load_s

    def began(self, peer: int, num_bytes: int) -> int:
        """Return how many bytes of other pulls are before it."""
        before = self._peers[peer].queued_bytes
        self._peers[peer].queued_bytes += num_bytes
        return before

    def ended(self, peer: int, num_bytes: int) -> None:
        self._peers[peer].queued_bytes -= num_bytes

    def came(self, peer: int, num_bytes: int, took_s: float, now_s: float) -> None:
        """A pull took so long, with what was before it when it began: so many bytes together."""
        came = min(took_s / self._link_s(peer, num_bytes), OUTLIER)
        ratio = KEPT * self._ratio(peer, now_s) + (1 - KEPT) * came
        self._peers[peer].ratio, self._peers[peer].learned_s = ratio, now_s

    def missed(self, peer: int, now_s: float) -> None:
        """A pull did not come in time."""
        self._peers[peer].shunned_until_s = now_s + MISSED_S

    def was_wrong(self, peer: int, now_s: float) -> None:
        """What came was not what was sent."""
        self._peers[peer].shunned_until_s = now_s + WRONG_S

    def _link_s(self, peer: int, num_bytes: int) -> float:
        return LATENCY_S + num_bytes / self._peers[peer].bytes_per_s

    def _ratio(self, peer: int, now_s: float) -> float:
        known = self._peers[peer]
        return 1 + (known.ratio - 1) * math.exp2((known.learned_s - now_s) / HALF_LIFE_S)
