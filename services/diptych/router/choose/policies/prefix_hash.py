"""Sends prompts that begin alike to the same workers, unless these have more than their share to do: then to the next
in the order of the prompt's key. Needs no index.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker
from diptych.router.choose.policies.shares import load_of, overloaded, place


def prefix_hash(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    places = [place(request.prefix_key, worker.instance_id) for worker in workers]
    loads = [load_of(worker, request, kind) for worker in workers]
    over = overloaded(workers, loads, request, kind)
    return [at + is_over for at, is_over in zip(places, over, strict=True)]
