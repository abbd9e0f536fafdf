"""The format of a page on a medium: a header and the page's bytes in the order in which they are handed over. Pure.

The header says what the page is, to whom it is of use, and what its bytes must be. All of it but the digest is known to
who looks for the page, so a page is what it should be exactly if its header is the one that its reader would write.

| bytes | what |
|---|---|
| 8 | magic |
| 2, 2, 4 | version of the format; group; bytes of the payload |
| 16 | digest of the terms: see `terms_digest` |
| 16 | proof of the tokens: see `page_ids` |
| 8, 8 | name of the page, and of the page before it |
| 16 | XXH3-128 of the payload |
| 40 | zeros |
| 8 | XXH3-64 of the bytes before |

Numbers are little-endian. A version that is not ours is not read: nobody converts what can be computed.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from diptych.engine.cache.page_ids import PageId

MAGIC: Final = b"DIPTYCHP"
VERSION: Final = 1
TERMS_NBYTES: Final = 16
_FIELDS: Final = struct.Struct("<8sHHI16s16sQQ16s40x")
HEADER_NBYTES: Final = _FIELDS.size + 8

Buffer = Any  # what has the buffer protocol: bytes, memoryview, numpy array


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What all records of a medium have in common."""

    terms: bytes
    page_nbytes: int

    @property
    def record_nbytes(self) -> int:
        return HEADER_NBYTES + self.page_nbytes


def terms_digest(terms: Mapping[str, Any]) -> bytes:
    """Return a digest of what must be equal where a page was computed and where it is used; values are JSON's."""
    text = json.dumps(terms, sort_keys=True, default=_listed)
    return hashlib.blake2b(text.encode(), digest_size=TERMS_NBYTES).digest()


def rank_terms(terms: bytes, rank: int) -> bytes:
    """Return the digest of the terms of a rank; `terms`: that of rank 0, which say how many ranks there are."""
    return hashlib.blake2b(terms + rank.to_bytes(4, "little"), digest_size=TERMS_NBYTES).digest() if rank else terms


def header(terms: bytes, page_id: PageId, payload: Buffer) -> bytes:
    """Return the header of a page."""
    fields = _fields(terms, page_id, memoryview(payload).nbytes, xxhash.xxh3_128_digest(payload))
    return fields + xxhash.xxh3_64_digest(fields)[::-1]


def open_headers(record: PageFormat, ids: Iterable[PageId]) -> bytes:
    """Return headers, one behind the other, without what follows from payloads: zeros are there."""
    end = bytes(HEADER_NBYTES - _FIELDS.size)
    return b"".join([_fields(record.terms, page_id, record.page_nbytes, b"") + end for page_id in ids])


def _fields(terms: bytes, page_id: PageId, nbytes: int, digest: bytes) -> bytes:
    group, name, parent, proof = page_id
    return _FIELDS.pack(MAGIC, VERSION, group, nbytes, terms, proof, name, parent, digest)


def is_sound(found: Buffer, terms: bytes, page_id: PageId, payload: Buffer) -> bool:
    """Whether `found` is the header of this page, and `payload` its bytes."""
    return bool(header(terms, page_id, payload) == bytes(found))


def whose(found: Buffer, terms: bytes, nbytes: int) -> PageId | None:
    """Return what a header says to be behind it; None: nothing of these terms and of this size, in this version."""
    fields = bytes(found[: _FIELDS.size])
    if len(found) < HEADER_NBYTES or xxhash.xxh3_64_digest(fields)[::-1] != bytes(found[_FIELDS.size : HEADER_NBYTES]):
        return None
    magic, version, group, length, its_terms, proof, name, parent, _ = _FIELDS.unpack(fields)
    if (magic, version, length, its_terms) != (MAGIC, VERSION, nbytes, terms):
        return None
    return PageId(group, name, parent, proof)


def _listed(value: Any) -> Any:
    """Return a set as JSON has it."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{value!r} has no form in JSON that is the same in every process")
