"""How fast pages go over links, from how many bytes workers say that they have sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from diptych.v1.worker_pb2 import LinkStatus

MIN_S: Final = 0.5  # between two counts that a rate is made of

Counts = Mapping[int, int]  # bytes by peer
Rates = Mapping[int, float]  # bytes/s by peer

NONE: Final[Rates] = MappingProxyType({})


class _Told:
    """A worker's word of all its links, and the rates since the word before. Both are counted when somebody asks."""

    __slots__ = ("_before", "_counts", "_links", "_rates", "at_s")

    def __init__(self, at_s: float, links: Sequence[LinkStatus], before: _Told | None) -> None:
        self.at_s = at_s
        self._links = links
        self._before = before
        self._counts: Counts | None = None
        self._rates: Rates = NONE

    @property
    def rates(self) -> Rates:
        """The same object each time."""
        if self._before is not None:
            self._rates = rates_of(self._before.counts(), self.counts(), self.at_s - self._before.at_s)
            self.forget_before()
        return self._rates

    def counts(self) -> Counts:
        if self._counts is None:
            self._counts = {link.peer_instance_id: link.bytes_sent for link in self._links}
        return self._counts

    def forget_before(self) -> None:
        self._before = None


class LinkRates:
    """Tell it what comes; ask it for values. They are made when somebody asks: workers tell more than is looked at."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}

    def of(self, instance_id: int) -> Rates:
        """Return the rates of a worker's links that have any: the same object until there are newer ones."""
        told = self._told.get(instance_id)
        return NONE if told is None else told.rates

    def add(self, instance_id: int, links: Sequence[LinkStatus], now_s: float) -> None:
        """A worker has told of all its links."""
        before = self._told.get(instance_id)
        if before is not None and now_s - before.at_s < MIN_S:
            return
        if before is not None:
            before.forget_before()
        self._told[instance_id] = _Told(now_s, links, before)

    def forget(self, instance_id: int) -> None:
        self._told.pop(instance_id, None)


def rates_of(before: Counts, after: Counts, elapsed_s: float) -> Rates:
    """Return what has been sent since, by second. A count that is smaller has begun again: its link is another one."""
    if before == after:
        return NONE
    sent = ((peer, count, count - before.get(peer, 0)) for peer, count in after.items())
    return {peer: (count if more < 0 else more) / elapsed_s for peer, count, more in sent if more}
