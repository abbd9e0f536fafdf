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


class _Told(NamedTuple):
    """A worker's word of all its links."""

    at_s: float
    links: Sequence[LinkStatus]


class _Counted(NamedTuple):
    """What was made of one."""

    at_s: float
    counts: Counts
    rates: Rates


class LinkRates:
    """Tell it what comes; ask it for values. They are made when somebody asks: workers tell more than is looked at."""

    def __init__(self) -> None:
        self._counted: dict[int, _Counted] = {}
        self._told: dict[int, _Told] = {}  # and not counted yet

    def of(self, instance_id: int) -> Rates:
        """Return the rates of a worker's links that have any: the same object until there are newer ones."""
        told, before = self._told.pop(instance_id, None), self._counted.get(instance_id)
        if told is not None and before is not None:
            counts = counts_of(told.links)
            rates = rates_of(before.counts, counts, told.at_s - before.at_s)
            before = self._counted[instance_id] = _Counted(told.at_s, counts, rates)
        return NONE if before is None else before.rates

    def add(self, instance_id: int, links: Sequence[LinkStatus], now_s: float) -> None:
        """A worker has told of all its links."""
        before = self._counted.get(instance_id)
        if before is None:
            self._counted[instance_id] = _Counted(now_s, counts_of(links), NONE)
        elif now_s - before.at_s >= MIN_S:
            self._told[instance_id] = _Told(now_s, links)

    def forget(self, instance_id: int) -> None:
        self._counted.pop(instance_id, None)
        self._told.pop(instance_id, None)


def counts_of(links: Sequence[LinkStatus]) -> Counts:
    return {link.peer_instance_id: link.bytes_sent for link in links}


def rates_of(before: Counts, after: Counts, elapsed_s: float) -> Rates:
    """Return what has been sent since, by second. A count that is smaller has begun again: its link is another one."""
    if before == after:
        return NONE
    sent = ((peer, count, count - before.get(peer, 0)) for peer, count in after.items())
    return {peer: (count if more < 0 else more) / elapsed_s for peer, count, more in sent if more}
