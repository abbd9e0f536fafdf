"""Which segment of a log holds which page, which segments go, and what is at the end of each. Pure.

A segment is a file of records of one size, each a page with its header. What is written at once begins at a multiple of
`BLOCK` bytes. Behind the records of a segment that is complete lies its *footer*: a table of keys and offsets, and at
the very end of the file a trailer with the table's place and digest. A segment without a sound footer was being written
when its process died: its records are found by their headers, each is verified, and what is torn is cut off.

The index is a dict: at 64 KiB a page, 1.6 million entries for 100 GB. No record is ever written in place; what is to go
goes with its segment, the oldest first, and what is wanted again meanwhile is written again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import xxhash

from diptych.common.arrays import I64
from diptych.engine.cache.page_ids import NOBODYS, PROOF_NBYTES, PageId
from diptych.engine.tiers.page_format import HEADER_NBYTES, VERSION, PageFormat, is_sound, whose

BLOCK: Final = 4096  # bytes, what devices read and write at least
FOOTER_MAGIC: Final = b"DIPTYCHF"
NUM_SEGMENTS: Final = 16  # of a full log, at least: so much of it goes at once
MAX_SEGMENT_NBYTES: Final = 256 * 2**20
KEY_NBYTES: Final = PROOF_NBYTES + 2

_ENTRY: Final = np.dtype([("key", f"V{KEY_NBYTES}"), ("offset", "<u4")])
_TRAILER: Final = struct.Struct("<8sHHI16sQ8x16s")  # magic, version, 0, entries, terms, offset of the table, digest
TRAILER_NBYTES: Final = _TRAILER.size


class Location(NamedTuple):
    """Where a record is."""

    segment: int
    offset: int

    @classmethod
    def of(cls, place: int) -> Location:
        return cls(place >> 32, place & 0xFFFF_FFFF)


class Table(NamedTuple):
    """The table of a footer."""

    keys: list[bytes]
    offsets: list[int] | I64


@dataclass(frozen=True, slots=True)
class SegmentFormat(PageFormat):
    """What all records of a log have in common, and the footers of its segments."""

    def footer(self, offset: int, table: Table) -> bytes:
        """Return what goes behind the records of a segment, at `offset`, which is a multiple of `BLOCK`."""
        entries = np.empty(len(table.keys), _ENTRY)
        entries["key"] = np.frombuffer(b"".join(table.keys), f"V{KEY_NBYTES}")
        entries["offset"] = table.offsets
        data = entries.tobytes()
        fields = (FOOTER_MAGIC, VERSION, 0, len(entries), self.terms, offset)
        digest = xxhash.xxh3_128_digest(data + _TRAILER.pack(*fields, b""))
        return data + bytes(-(len(data) + TRAILER_NBYTES) % BLOCK) + _TRAILER.pack(*fields, digest)

    def table_range(self, trailer: bytes, file_nbytes: int) -> tuple[int, int] | None:
        """Return where the table of a file's footer begins and ends; None: there is none of ours."""
        if len(trailer) != TRAILER_NBYTES:
            return None
        magic, version, _, count, terms, offset, _ = _TRAILER.unpack(trailer)
        end = offset + count * _ENTRY.itemsize
        if (magic, version, terms) != (FOOTER_MAGIC, VERSION, self.terms) or end > file_nbytes:
            return None
        return offset, end

    def read_table(self, data: bytes, trailer: bytes) -> Table | None:
        """Return a footer's table; None where that is not what was written."""
        if xxhash.xxh3_128_digest(data + trailer[:-16] + bytes(16)) != trailer[-16:]:
            return None
        entries = np.frombuffer(data, _ENTRY)
        return Table(entries["key"].tolist(), entries["offset"].astype(np.int64))

    def salvage(self, read: Callable[[int, int], bytes]) -> tuple[Table, int]:
        """Return the sound records of a segment that was not completed, and where they end.

        `read`: so many bytes at an offset, or fewer at the end of the file.
        They end with the first one that is torn: behind it nothing was complete.
        """
        keys: list[bytes] = []
        offsets: list[int] = []
        at, end, size = 0, 0, self.record_nbytes
        while len(data := memoryview(read(at, size))) == size:
            page_id = whose(data[:HEADER_NBYTES], self.terms, self.page_nbytes)
            if page_id is not None:
                if not self._is_sound(data, page_id):
                    break
                if page_id != NOBODYS:
                    keys.append(page_id.key)
                    offsets.append(at)
                at += size
                end = at
            elif at % BLOCK:
                at += -at % BLOCK
            else:
                break
        return Table(keys, offsets), end

    def _is_sound(self, record: memoryview, page_id: PageId) -> bool:
        return is_sound(record[:HEADER_NBYTES], self.terms, page_id, record[HEADER_NBYTES:])


@dataclass(slots=True)
class _Segment:
    nbytes: int = 0
    keys: list[bytes] = field(default_factory=list)


class SegmentIndex:
    """Knows where each page is, by its key. One thread changes it; others may ask or `lose` meanwhile."""

    def __init__(self, capacity_nbytes: int, record_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        least = -(-record_nbytes // BLOCK) * BLOCK
        self.segment_nbytes = max(least, min(MAX_SEGMENT_NBYTES, capacity_nbytes // NUM_SEGMENTS))
        self._at: dict[bytes, int] = {}  # segment << 32 | offset
        self._segments: dict[int, _Segment] = {}  # the oldest first
        self.nbytes = 0

    @property
    def num_pages(self) -> int:
        return len(self._at)

    @property
    def segments(self) -> Sequence[int]:
        return [*self._segments]

    def find(self, key: bytes) -> Location | None:
        at = self._at.get(key)
        return None if at is None else Location.of(at)

    def places(self, keys: Iterable[bytes]) -> I64 | None:
        """Return where records are, as numbers that grow with their offsets (`Location.of`); None: some are gone."""
        at = [*map(self._at.get, keys)]
        return None if None in at else np.array(at, np.int64)

    def is_old(self, location: Location) -> bool:
        """Whether the page will go with the next segments: in the older half of a log that is nearly full."""
        if self.nbytes + 2 * self.segment_nbytes <= self.capacity_nbytes:
            return False
        segments = self.segments  # at once: they may go meanwhile
        return len(segments) > 1 and location.segment <= segments[(len(segments) - 1) // 2]

    def add(self, segment: int, table: Table, nbytes: int, lost: Set[bytes] = frozenset()) -> None:
        """Records were written to a segment, which has so many bytes now. `lost`: keys that nobody is to find."""
        held = self._segments.setdefault(segment, _Segment())
        self.nbytes += nbytes - held.nbytes
        held.nbytes = nbytes
        held.keys.extend(table.keys)
        places = np.asarray(table.offsets, np.int64) + (segment << 32)
        found = zip(table.keys, places.tolist(), strict=True)
        self._at.update((each for each in found if each[0] not in lost) if lost else found)

    def lose(self, key: bytes) -> None:
        """What a record has is not what was written."""
        self._at.pop(key, None)

    def drop(self, segment: int) -> None:
        """Forget a segment and all that is only there."""
        gone = self._segments.pop(segment)
        self.nbytes -= gone.nbytes
        for key in gone.keys:
            at = self._at.get(key)
            if at is not None and at >> 32 == segment:
                self._at.pop(key, None)  # it may have been lost meanwhile

    def excess(self, coming_nbytes: int) -> list[int]:
        """Return the oldest segments, which must go before so many bytes come. Not the newest, where they go."""
        over, gone = self.nbytes + coming_nbytes - self.capacity_nbytes, []
        for number in self.segments[:-1]:
            if over <= 0:
                break
            over -= self._segments[number].nbytes
            gone.append(number)
        return gone

    def holding(self, keys: Iterable[bytes]) -> list[int]:
        """Return the segments in which any record of these pages is, the current ones and older ones."""
        wanted = set(keys)
        return [number for number, held in self._segments.items() if not wanted.isdisjoint(held.keys)]
