"""How fast pages go over links, from how many bytes workers say that they have sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from diptych.v1.worker_pb2 import LinkStatus

MIN_S: Final = 0.5  # between two counts that a rate is made of

Counts = Mapping[int, int]  # bytes by peer
Rates = Mapping[int, float]  # bytes/s by peer

NONE: Final[Rates] = MappingProxyType({})


class _Counted(NamedTuple):
    """What a worker told last."""

    at_s: float
    counts: Counts
    rates: Rates


class LinkRates:
    """Tell it what comes; ask it for values."""

    def __init__(self) -> None:
        self._workers: dict[int, _Counted] = {}

    def of(self, instance_id: int) -> Rates:
        """Return the rates of a worker's links that have any."""
        counted = self._workers.get(instance_id)
        return NONE if counted is None else counted.rates

    def add(self, instance_id: int, links: Sequence[LinkStatus], now_s: float) -> None:
        """A worker has told of all its links."""
        before = self._workers.get(instance_id)
        if before is not None and now_s - before.at_s < MIN_S:
            return
        counts = {link.peer_instance_id: link.bytes_sent for link in links}
        rates = NONE if before is None else rates_of(before.counts, counts, now_s - before.at_s)
        self._workers[instance_id] = _Counted(now_s, counts, rates)

    def forget(self, instance_id: int) -> None:
        self._workers.pop(instance_id, None)


def rates_of(before: Counts, after: Counts, elapsed_s: float) -> Rates:
    """Return what has been sent since, by second. A count that is smaller has begun again: its link is another one."""
    if before == after:
        return NONE
    sent = {peer: count - before.get(peer, 0) for peer, count in after.items()}
    sent = {peer: after[peer] if num_bytes < 0 else num_bytes for peer, num_bytes in sent.items()}
    return {peer: num_bytes / elapsed_s for peer, num_bytes in sent.items() if num_bytes}
