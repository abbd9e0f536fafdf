"""Chooses the pair under which fewest SLOs are missed: the request's own, and those of whom it delays.

A worker's role is how many tokens of prompts its steps may have beside outputs (`beside`), so any mixture of roles is a
choice of pairs. New outputs are *packed*: they go to the first worker that keeps their time per token with one more,
and leave the others free for prompts. A prompt goes where its first token is soonest: so a short one may be computed
where its output is made, and a worker with slack takes prompts that would come too late elsewhere. Packing is that of
Arrow (arXiv:2505.11916), lending slack to prompts that of TaiChi (arXiv:2508.01989).

Everything is counted in requests that miss their SLO (`missed`). An output costs those outputs that its worker then
does not keep, and those prompts that come while it lasts and find a slower worker. What is expected follows from who
runs, and for how long, not from queues alone: a worker without a queue may be full. Without both times of an SLO nobody
knows what would be missed: `pair_cost` chooses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, NamedTuple

from diptych.router.choose.policies.beside import compute_s, share_of, slowed_s, step_at, step_s
from diptych.router.choose.policies.cost import grant_s
from diptych.router.choose.policies.pair_cost import SHORTLIST, pair_cost
from diptych.router.choose.policies.policy import Candidates, Decision, RequestView, Worker
from diptych.router.workers.worker_view import Pair, WorkerLoad

UNSURE: Final = 0.1  # of an SLO: within so much of it nobody knows whether it will be kept
CLOSE: Final = 0.03  # the same of a time per token: what else comes to the worker is chosen, too
LATE: Final = 0.1  # what being late by a whole SLO more costs, once it is missed: less than another's miss
SOON: Final = 0.05  # what a first token is worth that comes at once, not when it is due
PLACE: Final = 0.02  # what another place in the order of workers is worth, for an output
NO_SHARE: Final = 0.1  # of its time: who has less for prompts is not counted among those that compute them
STEP_S: Final = 0.1
UNMEASURED: Final = WorkerLoad(0, 0, 0, output_step_s=1e-6)
MAX_TOKENS: Final = 0.8
MAX_GRANT_S: Final = 0.1  # until a step with prompts is over, in the mean: about half of the largest ones


def adaptive(candidates: Candidates, request: RequestView) -> Decision:
    if not request.slo.are_known:
        return pair_cost(candidates, request)
    candidates = _measured(candidates)
    workers = candidates.workers
    firsts = {key: _First.of(workers[key], request) for key in candidates.partners}
    outputs, crowded = _outputs_missed(candidates, request), _crowded(candidates, request)
    losses = {
        pair: outputs[pair.decode_id]
        + firsts[pair.prefill_id].missed(_granted_s(workers, pair, request), request)
        + _apart_lost(workers[pair.prefill_id], pair, request)
        + crowded[pair.prefill_id]
        for pair in _in_question(candidates, {key: first.soon_s for key, first in firsts.items()})
    }
    return Decision(min(losses, key=losses.__getitem__), "fewest SLOs missed")


def _measured(candidates: Candidates) -> Candidates:
    """Return the same, but who has not measured yet how long its steps take is as fast as one that has.

    Where nobody has, steps with outputs take no time: better than to take a guess for what outputs can't keep.
    """
    loads = [worker.load for worker in candidates.workers.values()]
    if all(load.output_step_s and load.prompt_token_s for load in loads):
        return candidates
    tokens = next((load for load in loads if load.output_step_s), UNMEASURED)
    prompts = next((load for load in loads if load.prompt_token_s), UNMEASURED)
    workers = {key: _as_fast_as(worker, tokens, prompts) for key, worker in candidates.workers.items()}
    return replace(candidates, workers=workers)


def _as_fast_as(worker: Worker, tokens: WorkerLoad, prompts: WorkerLoad) -> Worker:
    load = worker.load
    if not load.output_step_s:
        load = replace(load, output_step_s=tokens.output_step_s, context_token_s=tokens.context_token_s)
    if not load.prompt_token_s:
        load = replace(load, prompt_token_s=prompts.prompt_token_s)
    return replace(worker, load=load)


def missed(share: float, unsure: float = UNSURE) -> float:
    """Return how many requests miss an SLO of which they take such a share: none up to one, and a little more if late.

    Nobody knows what comes of those that take nearly all of it, or hardly more.
    """
    likely = min(1.0, max(0.0, (share - 1 + unsure) / (2 * unsure)))
    return likely + LATE * max(0.0, share - 1 - unsure)


def first_s(worker: Worker, request: RequestView) -> float:
    """Return when a worker would have the first token: behind its queue, and beside its outputs."""
    load = worker.load
    queue_s, own_s = _queue_s(worker), _own_s(worker, request)
    if load.prompt_budget < 0 and load.output_tokens:  # of prompts in its queue: they come before this one
        return queue_s + own_s / share_of(worker, request.slo.tpot_s)
    return slowed_s(worker, queue_s + own_s, request.slo.tpot_s)


def _queue_s(worker: Worker) -> float:
    """Return how long the prompts take that wait at a worker, or are computed there."""
    load = worker.load
    return load.num_queued * compute_s(worker, load.left_tokens / max(1, load.num_queued))


def _own_s(worker: Worker, request: RequestView) -> float:
    """Return how long a worker computes the request's prompt."""
    return compute_s(worker, max(1, request.prompt_len - worker.cached_tokens), worker.cached_tokens)


def _crowded(candidates: Candidates, request: RequestView) -> Mapping[int, float]:
    """Return how many prompts that come will be late because each worker computes this one.

    They may choose, too: they wait as long as all workers have others to compute. So long prompts that can wait queue up
    at one worker, and leave another to those that can't. Among equals whoever comes first goes first.
    """
    usual = request.usual
    queues = {key: _queue_s(candidates.workers[key]) for key in candidates.partners}
    if not usual.urgency or len(queues) < 2:
        return dict.fromkeys(queues, 0.0)
    ttft_s, (first_s, second_s) = usual.urgency**-2, sorted(queues.values())[:2]
    rate = _rate(candidates, request) * max(0.0, 1 - ttft_s / request.slo.ttft_s)

    def late(key: int) -> float:
        is_shortest = queues[key] == first_s
        busy_s = min(first_s + _own_s(candidates.workers[key], request), second_s) if is_shortest else first_s
        return rate * (busy_s - first_s) * missed(((busy_s + first_s) / 2 + usual.prompt_s) / ttft_s)

    return {key: late(key) for key in queues}


class _First(NamedTuple):
    """When a worker would have the first token: if outputs wait for it, and if it waits for them."""

    soon_s: float
    lost: float  # outputs, which wait, that are late by it
    late_s: float

    @staticmethod
    def of(worker: Worker, request: RequestView) -> _First:
        load, tpot_s = worker.load, request.slo.tpot_s
        queue_s, own_s = _queue_s(worker), _own_s(worker, request)
        late_s = first_s(worker, request)
        if not load.output_tokens:
            return _First(late_s, 0.0, late_s)
        spent_s = max(0.0, own_s - compute_s(worker, max(0, load.prompt_budget)))
        soon_s = (queue_s + own_s) / (1 - min(MAX_TOKENS, step_s(worker) / STEP_S))
        return _First(soon_s, _delayed_lost(worker, spent_s, request), late_s)

    def missed(self, granted_s: float, request: RequestView) -> float:
        soon, late = (_first_missed(max(at_s, granted_s), request) for at_s in (self.soon_s, self.late_s))
        return min(soon + self.lost, late)


def _delayed_lost(worker: Worker, seconds: float, request: RequestView) -> float:
    """Return how many outputs end late because all there wait for so long: those that end before they catch up."""
    gained_s = max(0.0, request.slo.tpot_s - step_s(worker))
    return worker.load.num_outputs * (min(1.0, seconds / (gained_s * request.output_len)) if gained_s else 1.0)


def _apart_lost(worker: Worker, pair: Pair, request: RequestView) -> float:
    """Return how many outputs end late because a prompt that is computed for another worker has a step of its own."""
    is_apart = worker.load.output_tokens and not pair.is_local
    return _delayed_lost(worker, step_at(worker, 0), request) if is_apart else 0.0


def _granted_s(workers: Mapping[int, Worker], pair: Pair, request: RequestView) -> float:
    """Return when the first token may come as far as the decode worker is concerned.

    Another worker does not begin with a prompt before it has pages there, and grants wait for the end of a step.
    """
    prefill, decode = workers[pair.prefill_id], workers[pair.decode_id]
    if pair.is_local:
        return grant_s(decode, request)
    step_s = compute_s(decode, decode.load.queued_tokens / max(1, decode.load.num_queued))
    own_s = compute_s(prefill, max(1, request.prompt_len - prefill.cached_tokens), prefill.cached_tokens)
    return grant_s(decode, request) + min(step_s / 2, MAX_GRANT_S) + own_s


def _in_question(candidates: Candidates, firsts: Mapping[int, float]) -> Iterator[Pair]:
    """Yield the pairs of the prefill workers whose first token is soonest, and workers that would serve alone."""
    soonest = set(heapq.nsmallest(SHORTLIST, firsts, key=lambda key: (firsts[key], key)))
    for key, partners in candidates.partners.items():
        yield from (Pair(key, each) for each in partners if key in soonest or key == each)


def _first_missed(ttft_s: float, request: RequestView) -> float:
    share = ttft_s / request.slo.ttft_s
    return missed(share) + SOON * min(1.0, share)


def _outputs_missed(candidates: Candidates, request: RequestView) -> Mapping[int, float]:
    """Return what an output costs at each worker that may make it."""
    workers, prompts = candidates.workers, _Prompts.of(candidates, request)
    makers = _makers(candidates, request, prompts)
    losses = {key: _output_missed(workers[key], request) for key in candidates.decode_ids}
    for key, worker in workers.items():
        if key in losses and key not in makers:
            losses[key] += PLACE + prompts.missed_by(worker, request)
    return losses


def _makers(candidates: Candidates, request: RequestView, prompts: _Prompts) -> Set[int]:
    """Return the workers that make outputs: so many that the one that has most to do has least, of those that make most.

    Each of them reads the weights in each step, and all share the contexts; prompts go where there is time. So outputs
    are packed as long as one worker keeps their time, and spread where that needs more.
    """
    workers, keys, tpot_s = candidates.workers, candidates.decode_ids, request.slo.tpot_s
    order = sorted(keys, key=lambda key: (key in candidates.partners, -workers[key].load.output_tokens, key))
    order.sort(key=lambda key: not _has_memory(workers[key], request))
    num_tokens = prompts.rate * request.output_len * tpot_s * _added(request)
    num_tokens = max(num_tokens, sum(workers[key].load.output_tokens for key in keys) + _added(request))
    asked = prompts.rate * prompts.work_s

    def busiest(count: int) -> float:
        each = max(step_at(workers[key], num_tokens / count) for key in order[:count]) / tpot_s
        both = sum(key in candidates.partners for key in order[:count])
        return max(each, (both * each + asked) / len(candidates.partners))

    return set(order[: min(range(1, len(order) + 1), key=busiest)])


def _added(request: RequestView) -> float:
    """Return the context of its output, in the mean."""
    return request.prompt_len + request.output_len / 2


def _output_missed(worker: Worker, request: RequestView) -> float:
    """Return how many outputs miss their SLO because another one is made there, which may miss it, too."""
    before_s, after_s = step_s(worker), step_s(worker, _added(request))
    own = missed(after_s / request.slo.tpot_s, CLOSE) + SOON * min(1.0, after_s / request.slo.tpot_s)
    return own + _others_missed(worker, request, before_s, after_s) + (not _has_memory(worker, request))


def _others_missed(worker: Worker, request: RequestView, before_s: float, after_s: float) -> float:
    """Return how many outputs miss their own SLOs when a token takes longer, by their weights against the request's.

    Those whose SLOs are not known are taken to have the request's.
    """
    outputs, slo = worker.load.outputs, request.slo
    lost = [
        count * other.weight / slo.weight * _more_missed(before_s, after_s, other.tpot_s)
        for other, count in outputs
        if other.tpot_s
    ]
    num_unknown = max(0, worker.load.num_outputs - sum(count for _, count in outputs))
    return sum(lost) + num_unknown * _more_missed(before_s, after_s, slo.tpot_s)


def _more_missed(before_s: float, after_s: float, tpot_s: float) -> float:
    return max(0.0, missed(after_s / tpot_s, CLOSE) - missed(before_s / tpot_s, CLOSE))


def _has_memory(worker: Worker, request: RequestView) -> bool:
    """Whether the output and those that are there will have pages, as far as is known: else somebody gives way."""
    load = worker.load
    growth = request.output_len * (1 + load.num_outputs / 2)
    return load.has_credit and load.free_tokens >= request.prompt_len + growth


class _Prompts(NamedTuple):
    """The prompts that come, and the workers that compute them."""

    rate: float  # a second
    work_s: float  # of each, at a worker that does nothing else
    ttft_s: float  # they are to have their first tokens within so long
    shares: Mapping[int, float]  # of their time that workers have for them
    lent: float  # prompts that the slack of outputs computes at once, at a worker that has all of its time

    @staticmethod
    def of(candidates: Candidates, request: RequestView) -> _Prompts:
        """Return what is known: those that come are like those that came, and as long as this one."""
        usual, slo = request.usual, request.slo
        shares = {key: share_of(candidates.workers[key], slo.tpot_s) for key in candidates.partners}
        rate = _rate(candidates, request)
        num_tokens = request.prompt_len / (1 + usual.found)  # that are not cached
        work_s = min(compute_s(candidates.workers[key], num_tokens) for key in shares)
        return _Prompts(rate, work_s, slo.ttft_s, shares, slo.tpot_s * request.output_len / 2 / work_s)

    def missed_by(self, worker: Worker, request: RequestView) -> float:
        """Return how many prompts miss their SLO because a worker makes an output, too.

        It is priced against a worker without any for as long as it outlasts the others: so a worker becomes free again.
        """
        key, others, tpot_s = worker.instance_id, worker.load.num_outputs, request.slo.tpot_s
        if key not in self.shares:
            return 0.0
        share = share_of(worker, tpot_s, _added(request))
        beside, alone = self.missed_more(key, self.shares[key], share), self.missed_more(key, 1.0, share)
        return request.output_len * tpot_s * (others * beside + alone) / (others + 1)

    def missed_by(self, worker: Worker, request: RequestView) -> float:
        """Return how many prompts miss their SLO because a worker makes an output, too.

        It is priced against a worker without any for as long as it outlasts the others: so a worker becomes free again.
        """
        key, others, tpot_s = worker.instance_id, worker.load.num_outputs, request.slo.tpot_s
        if key not in self.shares:
            return 0.0
        share = share_of(worker, tpot_s, _added(request))
        beside, alone = self.missed_more(key, self.shares[key], share), self.missed_more(key, 1.0, share)
        return request.output_len * tpot_s * (others * beside + alone) / (others + 1)

    def missed_more(self, key: int, before: float, after: float) -> float:
        """Return how many prompts a second miss their SLO because a worker has less of its time for them."""
        if not self.rate:
            return 0.0
        others = self.longest[self.shares[key] == self.longest[0]] if len(self.shares) > 1 else 0.0
        rest = self.sum - self.shares[key]
        more = self._missed(rest + after, max(others, after)) - self._missed(rest + before, max(others, before))
        return self.rate * max(0.0, more)

    def missed_more(self, key: int, before: float, after: float) -> float:
        """Return how many prompts a second miss their SLO because a worker has less of its time for them."""
        rest = [share for other, share in self.shares.items() if other != key]
        return self.rate * max(0.0, self._missed([*rest, after]) - self._missed([*rest, before]))

    def _missed(self, shares: Sequence[float]) -> float:
        """Return the share of prompts that miss it where workers have such shares of their time for them.

        As long as outputs have slack a prompt is computed as if there were none. That they have none left is as likely
        as that a queue is so long as there are prompts for which it lasts.
        """
        total, num_fast = sum(shares), sum(share > NO_SHARE for share in shares)
        busy = self.rate * self.work_s / total
        fast = self._late(self.rate * self.work_s / num_fast, num_fast) if num_fast else 1.0
        spent = min(1.0, busy) ** max(1.0, self.lent * total)
        return (1 - spent) * fast + spent * self._late(busy, total) + max(0.0, busy - 1)

    def _late(self, busy: float, speed: float) -> float:
        """Return how likely a prompt waits too long where workers of such a speed are so busy.

        By the approximations of Sakasegawa (1977), and of heavy traffic for equal prompts.
        """
        spare_s = self.ttft_s - self.work_s
        if busy >= 1 or spare_s <= 0:
            return 1.0
        waits = busy ** (math.sqrt(2 * (speed + 1)) - 1)
        return float(waits * math.exp(-2 * (1 - busy) * spare_s * speed / self.work_s))


def _rate(candidates: Candidates, request: RequestView) -> float:
    """Return how many requests come in a second, by those of this router, and how many of all are its own."""
    loads = [worker.load for worker in candidates.workers.values()]
    num_own = sum(load.num_own for load in loads)
    return request.usual.rate * (sum(load.num_requests for load in loads) / num_own if num_own else 1.0)
