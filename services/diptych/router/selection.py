"""Chooses the pair for an attempt: waits until there is one, avoids blamed instances, asks the policy."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from diptych.router.fleet import Fleet
from diptych.router.pairing import has_fresh, least_blamed
from diptych.router.policies.policy import Candidate, Policy, RequestView
from diptych.router.worker_view import Pair, WorkerLoad


class Selector:
    """Applies a policy to the pairs of a fleet."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self._fleet = fleet
        self._policy = policy
        self._numbers = itertools.count()

    async def select(self, prompt_len: int, adapter: str, blamed: Collection[int], wait_s: float) -> Pair:
        """Return a pair whose sessions are open. Raises `Unavailable` if there is none within `wait_s`."""
        pairs = least_blamed(await self._fleet.wait_for_pairs(wait_s, adapter), blamed)
        request = RequestView(prompt_len, next(self._numbers))
        if len(pairs) == 1:
            return pairs[0]
        return self._policy(self._candidates(pairs), request)

    def has_fresh_pair(self, adapter: str, blamed: Collection[int]) -> bool:
        """Whether a pair without blamed instances may serve now."""
        return has_fresh(self._fleet.pairs(adapter), blamed)

    def _candidates(self, pairs: Iterable[Pair]) -> list[Candidate]:
        loads: dict[int, WorkerLoad] = {}
        for pair in pairs:
            for instance_id in (pair.prefill_id, pair.decode_id):
                if instance_id not in loads:
                    loads[instance_id] = self._fleet.session(instance_id).load()
        return [Candidate(pair, loads[pair.prefill_id], loads[pair.decode_id]) for pair in pairs]
