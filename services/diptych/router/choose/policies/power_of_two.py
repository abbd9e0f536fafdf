"""Draws two workers and takes the less busy one: nearly as even as the least busy of all, with nobody overrun at once
by routers that know the same old loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker
from diptych.router.choose.policies.shares import draw, load_of


def power_of_two(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    drawn = sorted(range(len(workers)), key=lambda index: draw(workers[index], request, kind))[:2]
    return [load_of(worker, request, kind) if i in drawn else math.inf for i, worker in enumerate(workers)]
