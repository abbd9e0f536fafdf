"""Chooses the pair under which fewest SLOs are missed: the request's own, and those of whom it delays.

A worker's role is how many tokens of prompts its steps may have beside outputs (`WorkerLoad.prompt_budget`), so any
mixture of roles is a choice of pairs. New outputs are *packed*: they go to the first worker that keeps their time per
token with one more, and leave the others free for prompts. A prompt goes where its first token is soonest; beside
outputs it has their slack at once, and then only what each of their steps leaves. So short prompts are computed where
their output is made, and a worker with slack takes prompts that would come too late elsewhere. Packing is that of
Arrow (arXiv:2505.11916), the two kinds of slack those of TaiChi (arXiv:2508.01989).

What is expected follows from who runs, and for how long, not from queues alone: a worker without a queue may be full.
Without both times of an SLO nobody knows what would be missed: `pair_cost` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.router.choose.policies.cost import grant_s
from diptych.router.choose.policies.pair_cost import pair_cost
from diptych.router.choose.policies.policy import Candidates, Decision, RequestView, Worker
from diptych.router.workers.worker_view import Pair

KEPT: Final = 0.95  # of a time per token is planned with
LEAST_SHARE: Final = 0.02  # of their time that outputs leave to prompts: workers let no prompt starve
PLACE: Final = 0.02  # of an SLO: what another place in the order of workers is worth, for an output
SOON: Final = 0.2  # what a first token is worth that comes at once, not when it is due


class _Prompts(NamedTuple):
    """How a worker computes prompts beside the outputs that it has."""

    slack_s: float  # that they may take at once
    share: float  # of its time that they have then

    def seconds(self, work_s: float) -> float:
        """Return how long prompts take for which an idle worker needs `work_s`."""
        return work_s if work_s <= self.slack_s else self.slack_s + (work_s - self.slack_s) / self.share


def adaptive(candidates: Candidates, request: RequestView) -> Decision:
    if not request.objectives.are_known:
        return pair_cost(candidates, request)
    workers = candidates.workers
    prompts = {key: _first_token_s(workers[key], request) for key in candidates.partners}
    outputs = {key: _output_loss(workers[key], request) for key in candidates.decode_ids}
    order = sorted(outputs, key=lambda key: (outputs[key], key))
    places = {key: PLACE * place for place, key in enumerate(order)}
    losses = {
        pair: _loss(workers, request, pair, prompts[pair.prefill_id], outputs[pair.decode_id]) + places[pair.decode_id]
        for pair in candidates.pairs()
    }
    return Decision(min(losses, key=losses.__getitem__), "fewest SLOs missed")


def step_s(worker: Worker, context_tokens: float) -> float:
    """Return how long a step with outputs alone takes with so much context more than there is."""
    load, line = worker.load, worker.learned.decode
    num_tokens = load.output_tokens + context_tokens
    if load.output_step_s:
        return load.output_step_s + load.context_token_s * num_tokens
    return line.at(num_tokens)


def _prompts_of(worker: Worker, request: RequestView) -> _Prompts:
    load, tpot_s = worker.load, request.objectives.tpot_s
    if not load.output_tokens:
        return _Prompts(math.inf, 1.0)
    curve = worker.learned.prefill
    slack_s = load.queued_tokens * curve.mean_slope if load.prompt_budget < 0 else load.prompt_budget * curve.slope
    return _Prompts(slack_s, max(LEAST_SHARE, 1 - step_s(worker, 0.0) / tpot_s))


def _first_token_s(worker: Worker, request: RequestView) -> float:
    load, curve = worker.load, worker.learned.prefill
    queue_s = curve.base * load.num_queued + curve.mean_slope * load.queued_tokens
    compute_s = curve.at(max(1, request.prompt_len - worker.cached_tokens), worker.cached_tokens)
    return _prompts_of(worker, request).seconds(queue_s + compute_s)


def _output_loss(worker: Worker, request: RequestView) -> float:
    """Return by how much times per token there are exceeded with this output, as a share, summed over outputs."""
    added = request.prompt_len + request.output_len / 2
    excess = step_s(worker, added) / (KEPT * request.objectives.tpot_s) - 1
    return max(0.0, excess) * (1 + worker.load.num_outputs)


def _loss(workers: Mapping[int, Worker], request: RequestView, pair: Pair, first_s: float, output_loss: float) -> float:
    ttft_s = max(first_s, grant_s(workers[pair.decode_id], request)) / request.objectives.ttft_s
    return output_loss + max(0.0, ttft_s - 1) + SOON * min(1.0, ttft_s)
