"""Rotates over the prefill workers, and for each of them over its decode workers: all are equal. Looks at no load.

A unified worker serves alone only when it has no other to decode for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker


def round_robin(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    return [0.0] * len(workers)
