"""What several policies share: how busy a worker is with one kind of leg, and where keys and draws fall."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker

MAX_SHARE: Final = 1.25  # of the mean load: who would have more, with this request, has more than its share
SLACK: Final[Mapping[LegKind, float]] = {LegKind.PREFILL: 8192, LegKind.DECODE: 4}  # and always at least so much
_MASK: Final = (1 << 64) - 1


def load_of(worker: Worker, request: RequestView, kind: LegKind) -> float:
    """Prefill: tokens that wait to be computed. Decode: requests; infinite where it can't take this one."""
    if kind is LegKind.PREFILL:
        return worker.load.queued_tokens
    has_room = worker.load.has_credit and worker.load.free_tokens >= request.prompt_len
    return worker.load.num_requests if has_room else math.inf


def overloaded(
    workers: Sequence[Worker],
    loads: Sequence[float],
    request: RequestView,
    kind: LegKind,
    max_share: float = MAX_SHARE,
    slack: Mapping[LegKind, float] = SLACK,
) -> Sequence[bool]:
    """Return who has more than its share (Mirrokni, Thorup, Zadimoghaddam 2017: hashing with bounded loads)."""
    usable = [load for load in loads if load < math.inf]
    share = max_share / max(1, len(usable))
    bound = share * sum(usable) + slack[kind]
    added = [_added(worker, request, kind) for worker in workers]
    return [load + own > bound + share * own for load, own in zip(loads, added, strict=True)]


def _added(worker: Worker, request: RequestView, kind: LegKind) -> int:
    """Return by how much this request adds to `load_of` a worker."""
    return max(0, request.prompt_len - worker.cached_tokens) if kind is LegKind.PREFILL else 1


def place(key: int, instance_id: int) -> float:
    """Return where a worker stands for a key, from 0 to 1: the same everywhere, and unrelated for other keys.

    The lowest is the key's worker (rendezvous hashing): when a worker leaves, only its own keys move, evenly to all.
    """
    mixed = (key ^ instance_id * 0x9E3779B97F4A7C15) & _MASK  # then the finaliser of splitmix64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) / 2**64


def draw(worker: Worker, request: RequestView, kind: LegKind) -> float:
    """Return where a worker stands by chance, unrelated for its two roles."""
    return place(request.entropy if kind is LegKind.PREFILL else ~request.entropy, worker.instance_id)
