"""Names a set of weights cheaply: equal files give equal names, and in practice no others do.

Two workers exchange KV only when their weights are the same. Reading every byte would cost seconds a start, and shapes
alone are the same for every fine-tune, so the name covers the header, the sizes and samples spread over the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

NUM_SAMPLES = 64
SAMPLE_BYTES = 256


def stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Return bytes and time of change (ns) of each file: what is edited between two samples has others."""
    found = [path.stat() for path in files]
    return [(each.st_size, each.st_mtime_ns) for each in found]


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
