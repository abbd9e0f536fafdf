"""What a load costs workers: seconds of steps for its prompts, rows and contexts for its outputs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from diptych.engine.values.step_model import StepShape
from diptych.planner.values import Capacity, Kind

FEW: Final = 0.05  # of the requests may have shorter outputs than is counted on
MOST_YOUNG: Final = 128.0  # tokens


class Cost(NamedTuple):
    """What one request of a kind costs."""

    share: float  # of all requests
    work_s: float  # that its prompt is computed for, beside the constant of the steps that it is in
    num_steps: float  # at least, if nothing else is in them
    rows_s: float = 0.0  # that its output adds to steps that take place anyway


@dataclass(frozen=True, slots=True)
class Demand:
    """A load as work. Rates are for all workers together."""

    costs: tuple[Cost, ...]
    requests_per_s: float
    work_s: float  # of a prompt, in the mean
    full_steps: float  # of a prompt, in the mean, if prompts fill steps together
    output_tokens_per_s: float  # by steps of rows: the first token of an output comes with its prompt
    context: float  # tokens of a row's context, in the mean over time
    row_s: float  # that a row adds to steps that take place anyway
    young_tokens: float  # that hardly an output ends with fewer of
    handed_tokens: float  # of KV that a hand-off moves for each token of output
    backlog: float = 0.0  # workers that work off what is there already, beside what comes
    extra_rows: float = 0.0  # that are there beyond those that the load would keep there

    @property
    def work(self) -> float:
        """Return how many workers would be busy with it, if steps themselves cost nothing."""
        return self.requests_per_s * self.work_s + self.output_tokens_per_s * self.row_s

    @property
    def unevenness(self) -> float:
        """Return the square of how much the work of one request varies, by its mean: of N requests it is N times less.

        That of a compound Poisson process: the mean of the squares over the square of the mean is between kinds, and
        within one of them lengths vary about as much as numbers do.
        """
        work_s = [each.work_s + each.rows_s for each in self.costs]
        mean_s = sum(each.share * seconds for each, seconds in zip(self.costs, work_s, strict=True))
        square = sum(each.share * seconds**2 for each, seconds in zip(self.costs, work_s, strict=True))
        return 1.0 + (square / mean_s**2 if mean_s else 1.0)

    def times(self, factor: float) -> Demand:
        """Return the demand of as many times the load."""
        return replace(
            self,
            requests_per_s=self.requests_per_s * factor,
            output_tokens_per_s=self.output_tokens_per_s * factor,
            backlog=self.backlog * factor,
            extra_rows=self.extra_rows * factor,
        )


def demand(kinds: Sequence[Kind], capacity: Capacity) -> Demand:
    """Return what requests of these kinds cost workers of that capacity."""
    rate = sum(each.requests_per_s for each in kinds)
    shares = [each.requests_per_s / rate if rate else 0.0 for each in kinds]
    rows = [each.requests_per_s * max(0.0, each.output_len - 1) for each in kinds]
    tokens = sum(rows)
    contexts = sum(each * (kind.prompt_len + kind.output_len / 2) for each, kind in zip(rows, kinds, strict=True))
    context = contexts / tokens if tokens else 0.0
    new = sum(share * _new(kind) for share, kind in zip(shares, kinds, strict=True))
    row_s = capacity.step_model.row + capacity.step_model.context * context
    costs = tuple(_cost(each, share, row_s, capacity) for each, share in zip(kinds, shares, strict=True))
    return Demand(
        costs,
        rate,
        sum(each.share * each.work_s for each in costs),
        new / capacity.max_step_tokens,
        tokens,
        context,
        row_s,
        _young(kinds, rate),
        sum(each.requests_per_s * each.prompt_len for each in kinds) / tokens if tokens else 0.0,
    )


def _new(kind: Kind) -> float:
    """Return the tokens of a prompt to compute: one at least, even if all is cached."""
    return max(1.0, kind.prompt_len - kind.cached_len)


def _young(kinds: Sequence[Kind], rate: float) -> float:
    """Return half of the shortest outputs, without the few that are shorter than nearly all."""
    shorter = 0.0
    for kind in sorted(kinds, key=lambda each: each.output_len):
        shorter += kind.requests_per_s
        if shorter >= FEW * rate:
            return min(MOST_YOUNG, kind.output_len / 2)
    return 0.0


def _cost(kind: Kind, share: float, row_s: float, capacity: Capacity) -> Cost:
    new, model = _new(kind), capacity.step_model
    num_steps = math.ceil(new / capacity.max_step_tokens)
    pairs = new * (2 * kind.prompt_len - new) / 2
    work_s = model.work_s(StepShape(0, 0, round(new), max(0.0, pairs), num_steps))
    return Cost(share, work_s, num_steps, max(0.0, kind.output_len - 1) * row_s)
