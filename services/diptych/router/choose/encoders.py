"""Which encode worker encodes an image. Pure.

Rule: an image goes to the same worker as before, which may have its rows, unless that one has much more to do than
the least busy one. By rendezvous hashing (Thaler and Ravishankar 1998): when a worker comes or goes, only its images
go elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

SLACK: Final = 4  # images that a worker may have more than the least busy one, and still gets its own
MAX_OPEN: Final = 64  # images at a worker; who computes the prompt encodes further ones itself


def encoders_of(digest: bytes, open_legs: Mapping[int, int]) -> list[int]:
    """Return who may encode an image, the best one first, by how many images each worker has; nobody: all are busy."""
    able = {worker: count for worker, count in open_legs.items() if count < MAX_OPEN}
    least = min(able.values(), default=0)
    return sorted(able, key=lambda worker: (able[worker] > least + SLACK, _place(digest, worker)))


def _place(digest: bytes, worker: int) -> bytes:
    return blake2b(worker.to_bytes(8, "little") + digest, digest_size=8).digest()
