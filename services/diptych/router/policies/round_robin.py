"""Rotates over the prefill workers, and for each of them over its decode workers. Looks at no load."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.router.policies.policy import Candidate, RequestView
from diptych.router.worker_view import Pair


def round_robin(candidates: Sequence[Candidate], request: RequestView) -> Pair:
    prefills = sorted({candidate.pair.prefill_id for candidate in candidates})
    turn, index = divmod(request.number, len(prefills))
    pairs = [candidate.pair for candidate in candidates if candidate.pair.prefill_id == prefills[index]]
    return pairs[turn % len(pairs)]
