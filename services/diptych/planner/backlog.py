"""What is there already, beside what comes: prompts and outputs that workers have not worked off. Pure.

Rule: from who is *there* and how long they will be, running or waiting, never from queues alone: the prompt of 60,000
tokens that runs is in no queue. What present workers will have worked off before a new one could start is no reason to
start one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from diptych.common.members.roles import Role
from diptych.planner.demand import Demand
from diptych.planner.sizing import Sizing
from diptych.planner.values import Observed, Occupancy, Reason, Sizes, Why, Worker, WorkerState

CATCH_UP_S: Final = 30.0  # in which a backlog shall be worked off, at the latest in a worker's start time
PATIENCE_S: Final = 10.0  # of prompts at each worker are usual where no time to the first token was set
_USUAL: Final = 0.5  # of that time: prompts that wait for less are on time
_SERVING: Final = (WorkerState.READY, WorkerState.DRAINING)


class Backlog(NamedTuple):
    """A demand with what is there already, and what was said about it."""

    demand: Demand
    reasons: tuple[Reason, ...]
    prompts_s: float = 0.0  # of a worker's time, for the prompts that are there


def with_backlog(observed: Observed, ready: Sizes, demand: Demand, sizing: Sizing) -> Backlog:
    """Return the demand that works off in time what is there already."""
    held, reasons = _held(observed)
    factor = sizing.borne(ready, demand) if ready.serves else 0.0
    prompts_s = _prompts_s(observed, demand, held)
    backlog = _prompts_left(observed, ready, demand, prompts_s, factor)
    rows = _rows_left(observed, ready, demand, held)
    if backlog <= 0 and rows <= 0:
        return Backlog(demand, reasons, prompts_s)
    waits_s = max((each.longest_wait_s for _, each in held), default=0.0)
    words = (
        f"when new workers could be ready, prompts will keep {backlog:.1f} of them busy and {rows:.0f} outputs more "
        f"than usual will run"
    )
    if waits_s:
        words += f"; the oldest request without a first token has waited for {waits_s:.1f} s"
    told = (*reasons, Reason(Why.BACKLOG, words))
    return Backlog(replace(demand, backlog=backlog, extra_rows=rows), told, prompts_s)


def _held(observed: Observed) -> tuple[Sequence[tuple[Worker, Occupancy]], tuple[Reason, ...]]:
    """Return who is where; workers without metrics are taken for the mean of the others of their role, and named."""
    serving = [each for each in observed.workers if each.state in _SERVING]
    held = [(each, each.occupancy) for each in serving if each.occupancy is not None]
    silent = [each for each in serving if each.occupancy is None]
    if not silent:
        return held, ()
    guessed = [(each, _mean([one for worker, one in held if worker.role is each.role])) for each in silent]
    names = ", ".join(str(each.worker_id) for each in silent[:8])
    words = f"{len(silent)} of {len(serving)} workers do not say what they hold ({names}): taken for the others' mean"
    return [*held, *guessed], (Reason(Why.OCCUPANCY_UNKNOWN, words),)


def _mean(known: Sequence[Occupancy]) -> Occupancy:
    columns = list(zip(*known, strict=True)) or [(0.0,)] * len(Occupancy._fields)
    return Occupancy(*(sum(column) / len(column) for column in columns))


def _prompts_s(observed: Observed, demand: Demand, held: Sequence[tuple[Worker, Occupancy]]) -> float:
    """Return how long a worker would compute the prompts that are there."""
    capacity, new = observed.capacity, demand.full_steps * observed.capacity.max_step_tokens
    tokens = observed.queued_prompt_tokens + sum(each.prompt_tokens_left for _, each in held)
    token_s = demand.work_s / new if new else 0.0
    return tokens * (token_s + capacity.step_model.prompt_step / capacity.max_step_tokens)


def _prompts_left(observed: Observed, ready: Sizes, demand: Demand, prompts_s: float, factor: float) -> float:
    """Return how many workers prompts will keep busy that are left when a new worker could be ready."""
    usual_s = (ready.prefill + ready.both) * (_USUAL * observed.goal.ttft_s or PATIENCE_S)
    spare = demand.requests_per_s * demand.work_s * (factor - 1)  # workers' time a second that the load leaves
    left_s = prompts_s - usual_s - spare * observed.start_s
    return max(0.0, left_s) / max(CATCH_UP_S, observed.start_s)


def _rows_left(observed: Observed, ready: Sizes, demand: Demand, held: Sequence[tuple[Worker, Occupancy]]) -> float:
    """Return how many outputs more than the load's own will run when a new worker could be ready."""
    generating = [each for worker, each in held if worker.role is not Role.PREFILL]
    there = sum(each.num_running + each.num_waiting for each in generating)
    if not there or not ready.serves:
        return 0.0
    model = observed.capacity.step_model
    rows_each = there / max(1, ready.decode + ready.both)
    step_s = model.step + rows_each * demand.row_s
    own = demand.output_tokens_per_s * max(step_s, observed.goal.tpot_s)
    remaining_s = sum(each.output_tokens_left for each in generating) / there * step_s
    stay = max(0.0, 1 - observed.start_s / remaining_s) if remaining_s > 0 else 0.0
    extra = (there - own - 2 * own**0.5) * stay
    return extra if extra >= 1.0 else 0.0
