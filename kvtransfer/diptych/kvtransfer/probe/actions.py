"""What the two sides of a link test do and hear: the values between `WriterTests`, `ReaderTests` and their performer.

The actions of one peer are performed in order. The end of each `SendProbeNote`, `Write`, `Measure` and `Digest` is
reported by `done`. After `Failed` the link must be closed, and `end` called once it is down.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.kvtransfer.probe.notes import ProbeNote, ProbeOffer


@dataclass(frozen=True, slots=True)
class SendProbeNote:
    """Send a note."""

    peer: int
    note: ProbeNote


@dataclass(frozen=True, slots=True)
class FillProbe:
    """Fill our pattern pages with that of `seed`, to be written to the peer."""

    peer: int
    seed: int


@dataclass(frozen=True, slots=True)
class UsePath:
    """Bring pages to the peer over `path` from now on."""

    peer: int
    path: str


@dataclass(frozen=True, slots=True)
class Write:
    """Fill the offered pages from our pattern pages, with a digest, then send `note`."""

    peer: int
    offer: ProbeOffer
    note: ProbeNote


@dataclass(frozen=True, slots=True)
class Measure:
    """Fill the offered pages from any pages of ours, `num_rounds` times."""

    peer: int
    offer: ProbeOffer
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Digest:
    """Compute the digest of pages of ours."""

    peer: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PathResult:
    """How one path did."""

    path: str
    bytes_per_s: float = 0.0  # 0: not measured
    error: str = ""  # why it is not used


@dataclass(frozen=True, slots=True)
class Passed:
    """The link may be used."""

    peer: int
    path: str
    bytes_per_s: float
    results: tuple[PathResult, ...] = ()  # of every path, at the writer
    inbound: str = ""  # the path by which the peer writes here, at the reader


@dataclass(frozen=True, slots=True)
class Failed:
    """The link must not be used: close it."""

    peer: int
    reason: str
    results: tuple[PathResult, ...] = ()


Action = SendProbeNote | FillProbe | UsePath | Write | Measure | Digest | Passed | Failed


@dataclass(frozen=True, slots=True)
class Done:
    """A `SendProbeNote`, `Write`, `Measure` or `Digest` ended."""

    error: str | None = None
    digest: int | None = None  # of a Write or Digest
    nbytes: int = 0  # of a Measure
    seconds: float = 0.0  # that it took; 0: not known
