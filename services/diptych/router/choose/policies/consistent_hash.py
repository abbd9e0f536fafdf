"""Sends all requests of a session to the same workers, as long as these serve. Others take turns."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker
from diptych.router.choose.policies.shares import place


def consistent_hash(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    if not request.session:
        return [0.0] * len(workers)
    key = xxhash.xxh3_64_intdigest(request.session.encode())
    return [place(key, worker.instance_id) for worker in workers]
