"""How a worker computes prompts beside the outputs that it makes, as it tells of itself: `WorkerLoad.prompt_budget`.

So many tokens may be computed at once: it is the slack of the outputs there. The rest has what each step with outputs
leaves. Without outputs nothing holds prompts up.
"""

from __future__ import annotations

from typing import Final

from diptych.router.choose.fits import weight_of
from diptych.router.choose.policies.policy import Worker

LEAST_SHARE: Final = 0.02  # of its time that a worker has for prompts, whatever its outputs: none starves


def step_s(worker: Worker, context_tokens: float = 0.0) -> float:
    """Return how long a step without prompts takes, with so much context more than there is."""
    return step_at(worker, worker.load.output_tokens + context_tokens)


def step_at(worker: Worker, num_tokens: float) -> float:
    """Return how long a step without prompts takes, with so much context."""
    load, line = worker.load, worker.learned.decode
    return load.output_step_s + load.context_token_s * num_tokens if load.output_step_s else line.at(num_tokens)


def compute_s(worker: Worker, num_tokens: float, cached_tokens: float = 0.0) -> float:
    """Return how long a prompt takes that has the worker for itself.

    What was learned from requests won't do where outputs slowed their prompts down.
    """
    curve, token_s = worker.learned.prefill, worker.load.prompt_token_s
    if not token_s:
        return curve.at(num_tokens, cached_tokens)
    return token_s * weight_of(num_tokens, cached_tokens, curve.double)


def share_of(worker: Worker, tpot_s: float, context_tokens: float = 0.0) -> float:
    """Return which share of its time a worker has for prompts, while outputs keep a time per token."""
    if not worker.load.output_tokens + context_tokens:
        return 1.0
    return max(LEAST_SHARE, 1 - step_s(worker, context_tokens) / tpot_s)


def slowed_s(worker: Worker, work_s: float, tpot_s: float) -> float:
    """Return how long prompts take for which the worker alone would need `work_s`.

    `tpot_s`: that its outputs keep; 0: nobody said, and then each step has so many tokens of prompts.
    """
    budget = worker.load.prompt_budget
    if budget < 0 or not worker.load.output_tokens:
        return work_s
    at_once_s = compute_s(worker, budget)
    if work_s <= at_once_s:
        return work_s
    share = share_of(worker, tpot_s) if tpot_s else max(LEAST_SHARE, at_once_s / (at_once_s + step_s(worker)))
    return at_once_s + (work_s - at_once_s) / share
