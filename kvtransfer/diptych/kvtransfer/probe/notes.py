"""The notes of a link test, as values. `writer` and `reader` say who sends what when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Directions:
    """Both ends, first of all: in which directions pages may go at this end."""

    out: bool  # from us to peers
    into: bool  # from peers to us

    def towards(self, peer: Directions) -> Directions:
        """Return in which directions they may go between us and a peer."""
        return Directions(self.out and peer.into, self.into and peer.out)

    def is_within(self, other: Directions) -> bool:
        return other.out >= self.out and other.into >= self.into


@dataclass(frozen=True, slots=True)
class ProbeAsk:
    """Writer to reader: may I test the link?"""


@dataclass(frozen=True, slots=True)
class ProbeOffer:
    """Reader to writer: yes, into these pages of mine."""

    pages: tuple[int, ...]
    page_size: int  # tokens of each


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """Writer to reader, behind page writes: what do the pages hold?"""


@dataclass(frozen=True, slots=True)
class ProbeFound:
    """Reader to writer: this."""

    digest: int


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """Writer to reader: the pages are yours again, and this is the verdict."""

    path: str  # that the writer uses from now on; empty: none works
    bytes_per_s: float = 0.0  # on it; 0: not measured
    reason: str = ""  # why none works


ProbeNote = Directions | ProbeAsk | ProbeOffer | ProbeCheck | ProbeFound | ProbeEnd
