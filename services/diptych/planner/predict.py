"""How well workers of each role would serve a demand: a share of its requests that keep the goal. Pure.

Workers that do both put a piece of a prompt into each step, as large as the time per token allows, and at first as much
as outputs catch up with before they end; those that prefill are the same without rows, those that decode without
prompts. So one formula holds for all: steps with prompts last `pause_s` for what is in them anyway and up to `piece_s`
for the piece, and `least_s` at least, as they read weights; prompts queue for as many servers as there are workers.
Rows are as many as stay when each gets a token a step (Little's law). What one kind of request does to the others is in
it: long prompts make waits long for all, by their square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple

from diptych.planner.demand import Cost, Demand
from diptych.planner.queueing import FOR_EVER, Wait, at_most, wait
from diptych.planner.values import Capacity, Goal, Sizes

SPARE: Final = 0.95  # of the time per token is planned for: pieces are not cut to the token
MIN_PIECE_TOKENS: Final = 16  # less of a prompt a step is no progress
_SHARES: Final = tuple(each / 8 for each in range(9))  # of the load that workers which do both may take from others
_COARSE_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_MAX_S: Final = 1e6


class Rows(NamedTuple):
    """The outputs of one worker."""

    mean: float  # requests that get a token each step
    kept: float  # share of the time that there are no more of them than keep the goal and fit
    step_s: float  # with as many as there are at the most, as a rule


NO_ROWS: Final = Rows(0.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one or more workers that share a queue."""

    wait: Wait
    pause_s: float  # of a step, beside its piece of a prompt
    least_s: float  # of a step, however small its piece: it reads weights
    piece_s: float  # that a step has for prompts
    slack_s: float  # of prompts that outputs bear at once, as they catch up before they end
    busy: float  # share of the workers' time; 1 and above: they never catch up

    def own_s(self, cost: Cost) -> float:
        """Return how long a prompt takes that has a worker's steps for itself."""
        num_steps = max(cost.num_steps, (cost.work_s - self.slack_s) / self.piece_s)
        return max(self.least_s * num_steps, self.pause_s * num_steps + cost.work_s)

    @property
    def stretch(self) -> float:
        """Return how many times its work a prompt takes in steps that prompts fill together."""
        return max(self.least_s, self.pause_s + self.piece_s) / self.piece_s

    def within(self, limit_s: float, demand: Demand) -> float:
        """Return the share of the requests with a first token by then."""
        late_s = max(self.least_s, self.pause_s) / 2  # the step that runs when a prompt comes
        return sum(each.share * self.wait.within(limit_s - late_s - self.own_s(each)) for each in demand.costs)


@dataclass(frozen=True, slots=True)
class Prediction:
    """How workers would serve a demand."""

    kept: float  # share of the requests that keep the goal, 0 to 1
    prompts: tuple[tuple[float, Prompts], ...]  # and the share of the prompts that they get
    rows: tuple[tuple[float, Rows], ...]
    piece_tokens: float = 0.0  # of prompts a step, on workers that do both

    def ttft_s(self, demand: Demand, share: float) -> float:
        """Return the time by which so many have their first token; infinite if they never do."""
        low, high = 0.0, _MAX_S
        if self._within(high, demand) < share:
            return math.inf
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self._within(middle, demand) >= share else (middle, high)
        return high

    @property
    def is_steady(self) -> bool:
        """Whether nobody's line grows for ever, be it late or not."""
        rows = all(math.isfinite(each.mean) for _, each in self.rows)
        return rows and self.busy < 1 and (self.kept > 0 or bool(self.prompts))

    @property
    def step_s(self) -> float:
        """Return how long the slowest steps of rows take, as a rule."""
        return max((rows.step_s for share, rows in self.rows if share), default=0.0)

    @property
    def busy(self) -> float:
        return max((prompts.busy for share, prompts in self.prompts if share), default=0.0)

    def _within(self, limit_s: float, demand: Demand) -> float:
        return sum(share * each.within(limit_s, demand) for share, each in self.prompts)


NOTHING: Final = Prediction(0.0, (), ())


def predict(capacity: Capacity, sizes: Sizes, demand: Demand, goal: Goal) -> Prediction:
    """Return how so many workers would serve a demand, its load divided among the roles as is best."""
    if demand.requests_per_s <= 0 and not demand.backlog and not demand.extra_rows:
        return Prediction(1.0, (), ())
    if not sizes.serves:
        return NOTHING
    shares = _divisions(sizes)
    return max((_divided(capacity, sizes, demand, goal, *each) for each in shares), key=lambda found: found.kept)


def _divisions(sizes: Sizes) -> list[tuple[float, float]]:
    """Return what shares of prompts and of outputs those that do both might have."""
    several = sizes.prefill and sizes.decode
    some = _COARSE_SHARES if several else _SHARES
    prompts = (0.0,) if not sizes.both else some if sizes.prefill else (1.0,)
    rows = (0.0,) if not sizes.both else some if sizes.decode else (1.0,)
    return list(product(prompts, rows))


def _divided(
    capacity: Capacity, sizes: Sizes, demand: Demand, goal: Goal, prompt_share: float, row_share: float
) -> Prediction:
    busy = _time_for_prompts(demand, sizes.both, prompt_share)
    hand_s = demand.handed_tokens * capacity.kv_token_bytes / capacity.link_bytes_per_s  # for each token of output
    limit_s = goal.tpot_s or math.inf
    apart = _rows(capacity, demand, limit_s - hand_s, sizes.decode, 1 - row_share, 0.0)
    mixed = _rows(capacity, demand, limit_s - hand_s * (1 - prompt_share), sizes.both, row_share, busy)
    piece_s = _piece_s(capacity, demand, goal, mixed)
    slack_s = demand.young_tokens * max(0.0, goal.tpot_s * SPARE - mixed.step_s)
    alone = _prompts(capacity, demand, sizes.prefill, 1 - prompt_share, _whole_piece_s(capacity, demand), 0.0, 0.0)
    shared = _prompts(capacity, demand, sizes.both, prompt_share, piece_s, slack_s, mixed.step_s)
    prompts = tuple(each for each in ((1 - prompt_share, alone), (prompt_share, shared)) if each[0] > 0)
    rows = tuple(each for each in ((1 - row_share, apart), (row_share, mixed)) if each[0] > 0)
    early = sum(share * each.within(goal.ttft_s or _MAX_S, demand) for share, each in prompts)
    steady = sum(share * each.kept for share, each in rows)
    told_s = piece_s if mixed.mean else _piece_s(capacity, demand, goal, apart)  # they may get outputs, too
    return Prediction(early * steady, prompts, rows, told_s / _token_s(demand, capacity))


def _time_for_prompts(demand: Demand, num_workers: int, share: float) -> float:
    """Return the share of a worker's time that prompts add to its steps."""
    work = (demand.requests_per_s * demand.work_s + demand.backlog) * share
    return work / num_workers if num_workers else 0.0


def _token_s(demand: Demand, capacity: Capacity) -> float:
    """Return what a token of a prompt adds to a step."""
    tokens = demand.full_steps * capacity.max_step_tokens
    return max(1e-9, demand.work_s / tokens if tokens else 0.0)


def _whole_piece_s(capacity: Capacity, demand: Demand) -> float:
    return _token_s(demand, capacity) * capacity.max_step_tokens


def _rows(capacity: Capacity, demand: Demand, limit_s: float, num_workers: int, share: float, busy: float) -> Rows:
    """Return the rows of one of so many workers, which have such a share of the outputs and such a load of prompts."""
    if num_workers == 0 or share <= 0:
        return NO_ROWS
    model = capacity.step_model
    rate = demand.output_tokens_per_s * share / num_workers
    room = 1.0 - busy - rate * demand.row_s
    if room <= 0:
        return Rows(math.inf, 0.0, math.inf)
    mean = rate * model.step / room + demand.extra_rows * share / num_workers
    variance = mean / room * (1.0 - busy)  # rows slow each other down, so they bunch
    most = mean + math.sqrt(variance)
    limit = _most_rows(capacity, demand, limit_s * SPARE)
    return Rows(mean, at_most(limit, mean, variance), model.step + most * demand.row_s)


def _most_rows(capacity: Capacity, demand: Demand, limit_s: float) -> float:
    """Return how many rows a worker may have, by time, pages and options."""
    by_time = (limit_s - capacity.step_model.step) / demand.row_s if demand.row_s else math.inf
    if limit_s < capacity.step_model.step:
        return -1.0
    by_pages = capacity.kv_tokens / demand.context if demand.context else math.inf
    return math.floor(min(by_time, by_pages, capacity.max_requests))


def _piece_s(capacity: Capacity, demand: Demand, goal: Goal, rows: Rows) -> float:
    """Return how much time for prompts a step may have on a worker with such rows; below 0: none."""
    whole_s = _whole_piece_s(capacity, demand)
    if not goal.tpot_s or not rows.mean:
        return whole_s
    model = capacity.step_model
    return min(whole_s, goal.tpot_s * SPARE - rows.step_s + model.step - model.prompt_step)


def _prompts(
    capacity: Capacity, demand: Demand, num_workers: int, share: float, piece_s: float, slack_s: float, step_s: float
) -> Prompts:
    """Return how prompts fare with so many workers, which have such a share of them and steps of rows so long."""
    model = capacity.step_model
    least_s = max(step_s, model.step)
    pause_s = least_s - model.step + model.prompt_step
    if num_workers == 0 or piece_s < MIN_PIECE_TOKENS * _token_s(demand, capacity):
        return Prompts(FOR_EVER, pause_s, least_s, max(piece_s, 1e-9), 0.0, math.inf)
    each = Prompts(FOR_EVER, pause_s, least_s, piece_s, slack_s, 0.0)
    own = [(cost.share, each.own_s(cost)) for cost in demand.costs]
    together_s = demand.work_s * each.stretch
    alone_s = sum(part * seconds for part, seconds in own)
    rate = demand.requests_per_s * share
    backlog = demand.backlog * share * each.stretch
    crowded = min(1.0, (rate * together_s + backlog) / num_workers)
    mean_s = crowded * together_s + (1 - crowded) * alone_s
    square = sum(part * seconds**2 for part, seconds in own)
    offered = rate * mean_s + backlog
    waits = wait(num_workers, offered, mean_s, square)
    return replace(each, wait=waits, busy=offered / num_workers)
