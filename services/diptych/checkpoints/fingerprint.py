"""Names a set of weights cheaply: equal files give equal names, and in practice no others do.

Two workers exchange KV only when their weights are the same. Reading every byte would cost seconds a start, and shapes
alone are the same for every fine-tune, so the name covers the header, the sizes and samples spread over the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import xxhash

NUM_SAMPLES = 64
SAMPLE_BYTES = 256
PIECE_BYTES = 2**24  # that are read at once


def stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Return bytes and time of change (ns) of each file: what is edited between two samples has others."""
    found = [path.stat() for path in files]
    return [(each.st_size, each.st_mtime_ns) for each in found]


def contents(files: Sequence[Path]) -> list[tuple[int, str]]:
    """Return bytes and XXH3-128 of each file: the same wherever a copy of it is. Reads all of it."""
    return [(path.stat().st_size, _digest(path)) for path in files]


def fingerprint(files: Sequence[Path], header: bytes) -> str:
    """Return 32 hex digits for `header` and samples of `files`, in the order given."""
    digest = hashlib.sha256(header)
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for sample in range(NUM_SAMPLES):
                file.seek(sample * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _digest(path: Path) -> str:
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
