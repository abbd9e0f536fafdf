"""Chooses the prefill worker first, then the decode worker among its partners: each by a policy of its own.

Equals take turns. Of equal partners another worker is preferred to the prefill worker itself, as neither then computes
prompts between the steps of this request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import Candidates, Decision, Policy, RequestView, WorkerPolicy
from diptych.router.workers.worker_view import Pair


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
