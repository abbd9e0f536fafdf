"""Worker policies of a few lines: by chance, in turn, by a session, by how a prompt begins, or by what is cached.

`ByRole` makes a policy of one: it chooses the prefill worker first, then the decode worker among its partners. Equals
take turns. Of equal partners another worker is preferred to the prefill worker itself, as neither then computes prompts
between the steps of this request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import xxhash

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import (
    Candidates,
    Decision,
    Policy,
    RequestView,
    Worker,
    WorkerPolicy,
    draw,
    load_of,
    overloaded,
    place,
)
from diptych.router.workers.worker_view import Pair

MIN_MATCH: Final = 0.1  # of a prompt: less is not worth an uneven load
CACHE_MAX_SHARE: Final = 2.0  # of the mean load; what is cached is worth more of a queue than a hash that spreads keys
CACHE_SLACK: Final[Mapping[LegKind, float]] = {LegKind.PREFILL: 65_536, LegKind.DECODE: 4}


def cache_aware(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    """Choose the worker that has most of the prompt cached; the least busy one where that is too little.

    A favourite that has more than its share to do is released: its prompts go to the next that has them, or spread.
    """
    loads = [load_of(worker, request, kind) for worker in workers]
    over = overloaded(workers, loads, request, kind, CACHE_MAX_SHARE, CACHE_SLACK)
    enough = max(1.0, MIN_MATCH * request.prompt_len)
    return [
        load if is_over or worker.cached_tokens < enough else -worker.cached_tokens
        for worker, load, is_over in zip(workers, loads, over, strict=True)
    ]


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


@dataclass(frozen=True, slots=True)
class ByRole:
    """A pair policy out of a worker policy for both roles."""

    score: WorkerPolicy
    reason: str

    def __call__(self, candidates: Candidates, request: RequestView) -> Decision:
        prefills = self._scores(candidates, tuple(candidates.partners), request, LegKind.PREFILL)
        turn, prefill_id = _in_turn(_lowest(prefills), request.number)
        decodes = self._scores(candidates, candidates.partners[prefill_id], request, LegKind.DECODE)
        equals = _lowest(decodes)
        _, decode_id = _in_turn([one for one in equals if one != prefill_id] or equals, turn)
        scores = {LegKind.PREFILL: prefills, LegKind.DECODE: decodes}
        return Decision(Pair(prefill_id, decode_id), self.reason, scores=scores)

    def _scores(
        self, candidates: Candidates, ids: Sequence[int], request: RequestView, kind: LegKind
    ) -> Mapping[int, float]:
        workers = [candidates.workers[instance_id] for instance_id in ids]
        return dict(zip(ids, self.score(workers, request, kind), strict=True))


@dataclass(frozen=True, slots=True)
class EachRole:
    """A pair policy out of two: the prefill worker of the one, and its best partner by the other."""

    prefill: Policy
    decode: Policy

    def __call__(self, candidates: Candidates, request: RequestView) -> Decision:
        first = self.prefill(candidates, request)
        later = replace(request, number=request.number // len(candidates.partners))  # else turns would coincide
        second = self.decode(candidates.of_prefill(first.pair.prefill_id), later)
        return Decision(
            second.pair,
            f"prefill: {first.reason}; decode: {second.reason}",
            {**second.scores, **{kind: scores for kind, scores in first.scores.items() if kind is LegKind.PREFILL}},
        )


def _lowest(scores: Mapping[int, float]) -> Sequence[int]:
    lowest = min(scores.values())
    return [instance_id for instance_id, score in scores.items() if score == lowest]


def _in_turn(equals: Sequence[int], number: int) -> tuple[int, int]:
    """Return whose turn it is, and how often everybody had one."""
    turn, index = divmod(number, len(equals))
    return turn, equals[index]
