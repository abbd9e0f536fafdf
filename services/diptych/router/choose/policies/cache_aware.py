"""Chooses the worker that has most of the prompt cached; the least busy one where that is too little.

A favourite that has more than its share to do is released: its prompts go to the next that has them, or spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker
from diptych.router.choose.policies.shares import load_of, overloaded

MIN_MATCH: Final = 0.1  # of a prompt: less is not worth an uneven load
MAX_SHARE: Final = 2.0  # of the mean load; what is cached is worth more of a queue than a hash that spreads keys
SLACK: Final[Mapping[LegKind, float]] = {LegKind.PREFILL: 65_536, LegKind.DECODE: 4}


def cache_aware(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    loads = [load_of(worker, request, kind) for worker in workers]
    over = overloaded(workers, loads, request, kind, MAX_SHARE, SLACK)
    enough = max(1.0, MIN_MATCH * request.prompt_len)
    return [
        load if is_over or worker.cached_tokens < enough else -worker.cached_tokens
        for worker, load, is_over in zip(workers, loads, over, strict=True)
    ]
