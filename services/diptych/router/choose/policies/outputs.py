"""Where an output is made, and what that costs: outputs that its worker then does not keep, and prompts that come.

`makers` are the workers that make outputs. Each reads the weights in each step, and all share the contexts; prompts go
where there is time. So there are as many makers as leave least to do for whoever has most: outputs are packed as long
as one worker keeps their time, as by Arrow (arXiv:2505.11916), and spread where they need more. What is asked follows
from how many come and how long outputs become, not from who runs now: a fleet that is late has more who run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from typing import Final

from diptych.router.choose.policies.beside import step_at, step_s
from diptych.router.choose.policies.coming import ComingPrompts
from diptych.router.choose.policies.missing import CLOSE, SOON, missed
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker

PLACE: Final = 0.02  # what it is worth, in any case, that no other worker makes outputs


def outputs_missed(candidates: Candidates, request: RequestView) -> Mapping[int, float]:
    """Return what an output costs at each worker that may make it."""
    workers, prompts = candidates.workers, ComingPrompts.of(candidates, request)
    losses = {key: _output_missed(workers[key], request) for key in candidates.decode_ids}
    for key in losses.keys() - makers(candidates, request, prompts):
        losses[key] += PLACE + prompts.missed_by(workers[key], added(request), request)
    return losses


def makers(candidates: Candidates, request: RequestView, prompts: ComingPrompts) -> Set[int]:
    """Return the workers that make outputs: so many that whoever has most to do has least, of those that make most."""
    workers, keys, tpot_s = candidates.workers, candidates.decode_ids, request.slo.tpot_s
    order = sorted(keys, key=lambda key: _rank(workers[key], key in candidates.partners, request))
    num_tokens = prompts.rate * request.output_len * tpot_s * added(request)
    num_tokens = max(num_tokens, sum(workers[key].load.output_tokens for key in keys) + added(request))
    bases = itertools.accumulate(step_at(workers[key], 0) for key in order)
    slopes = itertools.accumulate(step_at(workers[key], 1) - step_at(workers[key], 0) for key in order)
    both = itertools.accumulate(key in candidates.partners for key in order)
    loads = [
        _busiest(base_s / count / tpot_s + slope_s / count * num_tokens / count / tpot_s, num, candidates, prompts)
        for count, (base_s, slope_s, num) in enumerate(zip(bases, slopes, both, strict=True), 1)
    ]
    return set(order[: loads.index(min(loads)) + 1])


def _rank(worker: Worker, computes_prompts: bool, request: RequestView) -> tuple[bool, bool, int, int]:
    load = worker.load
    return not _has_memory(worker, request), computes_prompts, -load.output_tokens, worker.instance_id


def _busiest(each: float, num_both: int, candidates: Candidates, prompts: ComingPrompts) -> float:
    """Return the share of its time that whoever has most to do needs, where makers need `each` for outputs.

    `num_both` of them compute prompts, too, which are spread so that all have as much to do as can be.
    """
    return max(each, (num_both * each + prompts.rate * prompts.work_s) / len(candidates.partners))


def added(request: RequestView) -> float:
    """Return the context of its output, in the mean."""
    return request.prompt_len + request.output_len / 2


def _output_missed(worker: Worker, request: RequestView) -> float:
    """Return how many outputs miss their SLO because another one is made there, which may miss it, too."""
    before_s, after_s = step_s(worker), step_s(worker, added(request))
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
