"""Chooses the pair under which fewest SLOs are missed: the request's own, and those of whom it delays.

A worker's role is how many tokens of prompts its steps may have beside outputs (`WorkerLoad.prompt_budget`), so any
mixture of roles is a choice of pairs. New outputs are *packed*: they go to the first worker that keeps their time per
token with one more, and leave the others free for prompts. A prompt goes where its first token is soonest; beside
outputs it has their slack at once, and then only what each of their steps leaves. So short prompts are computed where
their output is made, and a worker with slack takes prompts that would come too late elsewhere. Packing is that of
Arrow (arXiv:2505.11916), the two kinds of slack those of TaiChi (arXiv:2508.01989).

Everything is counted in requests that miss their SLO (`missed`). An output costs those outputs that its worker then
does not keep, and those prompts that come while it lasts and find a slower worker. What is expected follows from who
runs, and for how long, not from queues alone: a worker without a queue may be full. Without both times of an SLO nobody
knows what would be missed: `pair_cost` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.router.choose.fits import weight_of
from diptych.router.choose.policies.cost import grant_s
from diptych.router.choose.policies.pair_cost import pair_cost
from diptych.router.choose.policies.policy import Candidates, Decision, RequestView, Worker

LEAST_SHARE: Final = 0.02  # of their time that outputs leave to prompts: workers let no prompt starve
UNSURE: Final = 0.1  # of an SLO: within so much of it nobody knows whether it will be kept
LATE: Final = 0.1  # what being late by a whole SLO more costs, once it is missed: less than another's miss
SOON: Final = 0.05  # what a first token is worth that comes at once, not when it is due
PLACE: Final = 0.02  # what another place in the order of workers is worth, for an output
MAX_BUSY: Final = 0.98


class _Outputs(NamedTuple):
    """What a worker does for its outputs."""

    step_s: float  # a step without prompts
    share: float  # of its time that prompts have beside them


def adaptive(candidates: Candidates, request: RequestView) -> Decision:
    if not request.objectives.are_known:
        return pair_cost(candidates, request)
    workers = candidates.workers
    firsts = {key: first_s(workers[key], request) for key in candidates.partners}
    demand = _demand(candidates, request)
    outputs = {key: _output_loss(candidates, request, key, demand) for key in candidates.decode_ids}
    order = sorted(outputs, key=lambda key: (outputs[key], key))
    places = {key: PLACE * place for place, key in enumerate(order)}
    losses = {
        pair: outputs[pair.decode_id]
        + places[pair.decode_id]
        + _first_loss(max(firsts[pair.prefill_id], grant_s(workers[pair.decode_id], request)), request)
        for pair in candidates.pairs()
    }
    return Decision(min(losses, key=losses.__getitem__), "fewest SLOs missed")


def missed(share: float) -> float:
    """Return how many requests miss an SLO of which they take such a share: between none and one, and a little more."""
    certain = min(1.0, max(0.0, (share - 1 + UNSURE) / (2 * UNSURE)))
    return certain + LATE * max(0.0, share - 1 - UNSURE)


def step_s(worker: Worker, context_tokens: float = 0.0) -> float:
    """Return how long a step without prompts takes with so much context more than there is."""
    load, line = worker.load, worker.learned.decode
    num_tokens = load.output_tokens + context_tokens
    return load.output_step_s + load.context_token_s * num_tokens if load.output_step_s else line.at(num_tokens)


def compute_s(worker: Worker, num_tokens: float, cached_tokens: float = 0.0) -> float:
    """Return how long a prompt takes that has the worker for itself."""
    curve = worker.learned.prefill
    slope_s = worker.load.prompt_token_s
    if not slope_s:
        return curve.at(num_tokens, cached_tokens)
    return slope_s * weight_of(num_tokens, cached_tokens, curve.double)


def first_s(worker: Worker, request: RequestView) -> float:
    """Return when a worker would have the first token: behind its queue, and beside its outputs."""
    load = worker.load
    one_s = compute_s(worker, load.queued_tokens / max(1, load.num_queued))
    queue_s = one_s * load.num_queued
    work_s = queue_s + compute_s(worker, max(1, request.prompt_len - worker.cached_tokens), worker.cached_tokens)
    if not load.output_tokens:
        return work_s
    slack_s = queue_s if load.prompt_budget < 0 else compute_s(worker, load.prompt_budget)
    if work_s <= slack_s:
        return work_s
    return slack_s + (work_s - slack_s) / share_of(worker, request.objectives.tpot_s)


def share_of(worker: Worker, tpot_s: float, context_tokens: float = 0.0) -> float:
    """Return which share of its time a worker has for prompts, with so much context more than there is."""
    if not worker.load.output_tokens + context_tokens:
        return 1.0
    return max(LEAST_SHARE, 1 - step_s(worker, context_tokens) / tpot_s)


def _first_loss(ttft_s: float, request: RequestView) -> float:
    share = ttft_s / request.objectives.ttft_s
    return missed(share) + SOON * min(1.0, share)


class _Demand(NamedTuple):
    """The prompts that come."""

    rate: float  # a second
    work_s: float  # of each, at a worker that does nothing else


def _demand(candidates: Candidates, request: RequestView) -> _Demand:
    usual = request.usual
    if usual.prompt_s <= 0:
        return _Demand(0.0, 0.0)
    worker = candidates.workers[next(iter(candidates.partners))]
    rate = usual.busy * len(candidates.partners) / usual.prompt_s
    return _Demand(rate, compute_s(worker, request.prompt_len))


def _output_loss(candidates: Candidates, request: RequestView, key: int, demand: _Demand) -> float:
    """Return how many requests miss their SLO because the output is made there: outputs, itself too, and prompts."""
    worker, tpot_s = candidates.workers[key], request.objectives.tpot_s
    added = request.prompt_len + request.output_len / 2
    before, after = missed(step_s(worker) / tpot_s), missed(step_s(worker, added) / tpot_s)
    loss = after + worker.load.num_outputs * max(0.0, after - before)
    if key not in candidates.partners or not demand.rate:
        return loss
    shares = {each: share_of(candidates.workers[each], tpot_s) for each in candidates.partners}
    now = _prompts_missed(shares.values(), demand, request)
    shares[key] = share_of(worker, tpot_s, added)
    then = _prompts_missed(shares.values(), demand, request)
    return loss + demand.rate * request.output_len * tpot_s * max(0.0, then - now)


def _prompts_missed(shares, demand: _Demand, request: RequestView) -> float:
    """Return which share of the prompts that come miss their SLO at workers with such shares of their time."""
    total = sum(shares)
    busy = demand.rate * demand.work_s / total
    longest = max(shares)
    alone_s = demand.work_s / longest
    if busy >= MAX_BUSY:
        return missed(alone_s / request.objectives.ttft_s + 1.0 / (1 - MAX_BUSY) * (busy - MAX_BUSY + 1 - MAX_BUSY))
    wait_s = busy / (1 - busy) * demand.work_s / total / 2
    return missed((alone_s + wait_s) / request.objectives.ttft_s)
