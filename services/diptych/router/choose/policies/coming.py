"""The prompts that come, and how many of them miss their SLO where workers have less time for them. Pure.

As long as outputs have slack a prompt is computed as if there were none (`StepPace`); behind that it has the share of
the time that they leave. So how long it waits follows from how many workers there are, and how often slack is spent
from the time that all of them have, against what is asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.router.choose.policies.beside import compute_s, share_of
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker

NO_SHARE: Final = 0.1  # of its time: who has less for prompts is not counted among those that compute them


class ComingPrompts(NamedTuple):
    """They are like those that came, and as long as the request's."""

    rate: float  # a second
    work_s: float  # of each, at a worker that does nothing else
    ttft_s: float  # they are to have their first tokens within so long
    shares: Mapping[int, float]  # of their time that workers have for them
    total: float  # of these
    num_fast: int  # workers that compute prompts at once while outputs have slack
    lent: float  # prompts that the slack of outputs lasts for, at a worker that has all of its time

    @staticmethod
    def of(candidates: Candidates, request: RequestView) -> ComingPrompts:
        slo, workers = request.slo, candidates.workers
        shares = {key: share_of(workers[key], slo.tpot_s) for key in candidates.partners}
        num_tokens = request.prompt_len / (1 + request.usual.found)  # that are not cached
        work_s = min(compute_s(workers[key], num_tokens) for key in shares)
        lent = slo.tpot_s * request.output_len / 2 / work_s
        num_fast = sum(map(_is_fast, shares.values()))
        rate = rate_of(candidates, request)
        return ComingPrompts(rate, work_s, slo.ttft_s, shares, sum(shares.values()), num_fast, lent)

    def missed_by(self, worker: Worker, context_tokens: float, request: RequestView) -> float:
        """Return how many prompts miss their SLO because a worker makes an output of such a context, too.

        It is priced against a worker without any for as long as it outlasts the others: so a worker becomes free again.
        """
        key, others, tpot_s = worker.instance_id, worker.load.num_outputs, request.slo.tpot_s
        if key not in self.shares:
            return 0.0
        share = share_of(worker, tpot_s, context_tokens)
        beside, alone = self._missed_more(key, self.shares[key], share), self._missed_more(key, 1.0, share)
        return request.output_len * tpot_s * (others * beside + alone) / (others + 1)

    def _missed_more(self, key: int, before: float, after: float) -> float:
        """Return how many prompts a second miss their SLO because a worker has less of its time for them."""
        total, num_fast = self.total - self.shares[key], self.num_fast - _is_fast(self.shares[key])
        more, less = (self._missed(total + own, num_fast + _is_fast(own)) for own in (after, before))
        return self.rate * max(0.0, more - less)

    def _missed(self, total: float, num_fast: int) -> float:
        """Return the share of prompts that miss it where workers have so much of their time for them in all.

        That no slack is left is as likely as a queue of as many prompts as it lasts for.
        """
        asked, busy = self.rate * self.work_s, self.rate * self.work_s / total
        fast = self._late(asked / num_fast, num_fast) if num_fast else 1.0
        spent = math.pow(min(1.0, busy), max(1.0, self.lent * total))
        return (1 - spent) * fast + spent * self._late(busy, total) + max(0.0, busy - 1)

    def _late(self, busy: float, speed: float) -> float:
        """Return how likely a prompt waits for too long where workers of such a speed are so busy.

        That it waits, by Sakasegawa (1977), "An approximation formula"; and for how long, by heavy traffic, for equal
        prompts.
        """
        spare_s = self.ttft_s - self.work_s
        if busy >= 1 or spare_s <= 0:
            return 1.0
        waits = math.pow(busy, math.sqrt(2 * (speed + 1)) - 1)
        return waits * math.exp(-2 * (1 - busy) * spare_s * speed / self.work_s)


def rate_of(candidates: Candidates, request: RequestView) -> float:
    """Return how many requests come in a second, by those of this router, and how many of all are its own."""
    loads = [worker.load for worker in candidates.workers.values()]
    num_own = sum(load.num_own for load in loads)
    return request.usual.rate * (sum(load.num_requests for load in loads) / num_own if num_own else 1.0)


def _is_fast(share: float) -> bool:
    return share > NO_SHARE
