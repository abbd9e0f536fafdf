"""Worker policies of a few lines: by chance, in turn, by the name of a session or by how a prompt begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker
from diptych.router.choose.policies.shares import draw, load_of, overloaded, place


def at_random(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    """Choose any worker, each as likely as the others."""
    return [draw(worker, request, kind) for worker in workers]


def power_of_two(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    """Draw two workers and take the less busy one.

    That is nearly as even as the least busy of all, and nobody is overrun at once by routers that know the same old
    loads.
    """
    drawn = sorted(range(len(workers)), key=lambda index: draw(workers[index], request, kind))[:2]
    return [load_of(worker, request, kind) if i in drawn else math.inf for i, worker in enumerate(workers)]


def round_robin(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    """Rotate over the prefill workers, and for each of them over its decode workers: all are equal. Looks at no load.

    A unified worker serves alone only when it has no other to decode for it.
    """
    return [0.0] * len(workers)


def consistent_hash(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    """Send all requests of a session to the same workers, as long as these serve. Others take turns."""
    if not request.session:
        return [0.0] * len(workers)
    key = xxhash.xxh3_64_intdigest(request.session.encode())
    return [place(key, worker.instance_id) for worker in workers]


def prefix_hash(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    """Send prompts that begin alike to the same workers, unless these have more than their share to do.

    Then they go to the next in the order of the prompt's key. It needs no index.
    """
    places = [place(request.prefix_key, worker.instance_id) for worker in workers]
    loads = [load_of(worker, request, kind) for worker in workers]
    over = overloaded(workers, loads, request, kind)
    return [at + is_over for at, is_over in zip(places, over, strict=True)]
