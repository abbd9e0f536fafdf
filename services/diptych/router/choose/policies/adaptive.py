"""Chooses the pair under which fewest SLOs are missed: the request's own, and those of whom it delays.

A worker's role is how many tokens of prompts its steps may have beside outputs (`beside`), so any mixture of roles is a
choice of pairs. `outputs` says where an output is made, and what that costs others. A prompt goes where its first token
is soonest: so a short one may be computed where its output is made, and a worker with slack takes prompts that would
come too late elsewhere, as by TaiChi (arXiv:2508.01989). Outputs there may wait for it, or it for them, as that
worker's scheduler will decide, too (`StepPace`): whichever loses less. Prompts that can wait leave a worker free for
those that can't.

Everything is counted in requests that miss their SLO (`missed`). What is expected follows from who runs, and for how
long, not from queues alone: a worker without a queue may be full. Without both times of an SLO nobody knows what would
be missed: `pair_cost` chooses.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from diptych.router.choose.policies.beginning import beginning, restored_s
from diptych.router.choose.policies.beside import compute_s, share_of, slowed_s, step_at, step_s
from diptych.router.choose.policies.coming import rate_of
from diptych.router.choose.policies.cost import grant_s
from diptych.router.choose.policies.missing import SOON, missed
from diptych.router.choose.policies.outputs import outputs_missed
from diptych.router.choose.policies.pair_cost import SHORTLIST, pair_cost
from diptych.router.choose.policies.policy import Candidates, Decision, RequestView, Worker
from diptych.router.workers.worker_view import Pair, WorkerLoad

MAX_GRANT_S: Final = 0.1  # until a step with prompts is over, in the mean: about half of the largest ones
STEP_S: Final = 0.1  # that a step with prompts takes, as long as there are some
MAX_TOKENS: Final = 0.8  # of such a step, for its outputs
MIXED: Final = SOON  # what it is worth, in any case, that a prompt delays no outputs: as much as being soon
UNMEASURED: Final = WorkerLoad(0, 0, 0, output_step_s=1e-6)


def adaptive(candidates: Candidates, request: RequestView) -> Decision:
    if not request.slo.are_known:
        return pair_cost(candidates, request)
    candidates = _measured(candidates)
    workers = candidates.workers
    firsts = {key: _First.of(workers[key], request) for key in candidates.partners}
    outputs, crowded = outputs_missed(candidates, request), _crowded(candidates, request)
    losses = {
        pair: outputs[pair.decode_id]
        + firsts[pair.prefill_id].missed(_granted_s(workers, pair, request), request)
        + _apart_lost(workers[pair.prefill_id], pair, request)
        + MIXED * bool(workers[pair.prefill_id].load.output_tokens)
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
        load = load._replace(output_step_s=tokens.output_step_s, context_token_s=tokens.context_token_s)
    if not load.prompt_token_s:
        load = load._replace(prompt_token_s=prompts.prompt_token_s)
    return worker._replace(load=load)


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
    here = worker if worker.held is None else worker._replace(held=None)
    return sum(beginning(here, request.prompt_len, partial(compute_s, worker)))


def _crowded(candidates: Candidates, request: RequestView) -> Mapping[int, float]:
    """Return how many prompts that come will be late because each worker computes this one.

    They may choose, too: they wait as long as all workers have others to compute. So long prompts that can wait queue
    up at one worker, and leave another to those that can't. Among equals whoever comes first goes first.
    """
    usual = request.usual
    queues = {key: _queue_s(candidates.workers[key]) for key in candidates.partners}
    if not usual.urgency or len(queues) < 2:
        return dict.fromkeys(queues, 0.0)
    ttft_s, (first_s, second_s) = usual.urgency**-2, sorted(queues.values())[:2]
    rate = rate_of(candidates, request) * max(0.0, 1 - ttft_s / request.slo.ttft_s)

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
        queue_s, own_s, late_s = _queue_s(worker), _own_s(worker, request), first_s(worker, request)
        if not worker.load.output_tokens:
            return _First(late_s, 0.0, late_s)
        spent_s = max(0.0, own_s - compute_s(worker, max(0, worker.load.prompt_budget)))
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
    return grant_s(decode, request) + restored_s(decode) + min(step_s / 2, MAX_GRANT_S) + _own_s(prefill, request)


def _in_question(candidates: Candidates, firsts: Mapping[int, float]) -> Iterator[Pair]:
    """Yield the pairs of the prefill workers whose first token is soonest, and workers that would serve alone."""
    soonest = set(heapq.nsmallest(SHORTLIST, firsts, key=lambda key: (firsts[key], key)))
    for key, partners in candidates.partners.items():
        yield from (Pair(key, each) for each in partners if key in soonest or key == each)


def _first_missed(ttft_s: float, request: RequestView) -> float:
    share = ttft_s / request.slo.ttft_s
    return missed(share) + SOON * min(1.0, share)
