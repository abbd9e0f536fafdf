"""What the best platform would have made of a load that is known beforehand: a search in the same simulator. Pure.

First every division of workers into roles, and every policy that is given, from as many workers as there may be down
to as few as nearly do: the cheapest of those that serve nearly as many calls well as the best one. Then, window by
window, whatever single change at its begin serves more, or as many for less: a flip, a worker less, one more.

The search is greedy, and so a lower bound of what hindsight could do; `fluid` is the upper one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from diptych.common.members.roles import Role
from diptych.planner.values import PLANNED_ROLES, Sizes
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import simulate
from diptych.simulator.setup import Action, Drain, Flip, Setup, Start
from diptych.simulator.traces.call import Call

NUM_WINDOWS: Final = 4
NEARLY: Final = 0.99  # of the most calls that were served well: who has so many may be the best for being cheaper
MORE: Final = 1.005  # times as many calls served well are a gain
CHEAPER: Final = 0.99  # times the GPU-hours are one, where as many are served well
SAME: Final = 0.999

Judge = Callable[[Outcome], int]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: what was there, and what came of it."""

    policy: str
    sizes: Sizes  # at the beginning
    actions: tuple[Action, ...]
    good: int  # calls that kept their SLO
    gpu_hours: float


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What the search has found."""

    static: Trial  # the best division that stays
    divided: Trial  # the best that changes between windows
    num_runs: int


class _Search:
    """Runs trials, and counts them."""

    def __init__(self, setup: Setup, calls: Sequence[Call], judge: Judge) -> None:
        self._setup = setup
        self._calls = calls
        self._judge = judge
        self.num_runs = 0

    def trial(self, policy: str, sizes: Sizes, actions: tuple[Action, ...] = ()) -> Trial:
        self.num_runs += 1
        worker = replace(self._setup.more, start_s=0.0)
        workers = tuple(replace(worker, role=role) for role in _roles(sizes))
        setup = replace(self._setup, workers=workers, policy=policy, actions=actions)
        outcome = simulate(setup, self._calls)
        return Trial(policy, sizes, actions, self._judge(outcome), outcome.gpu_s / 3600)


def hindsight(setup: Setup, calls: Sequence[Call], policies: Iterable[str], judge: Judge, most: int) -> Hindsight:
    """Search with up to `most` workers as `setup.more`; `judge` counts the calls that were served well."""
    search = _Search(setup, calls, judge)
    static = _static(search, tuple(policies), most)
    divided = static
    span_s = max(call.arrival_s for call in calls)
    for number in range(1, NUM_WINDOWS):
        changes = _changes(setup, divided, most, number * span_s / NUM_WINDOWS)
        trials = [search.trial(divided.policy, divided.sizes, (*divided.actions, change)) for change in changes]
        divided = max((each for each in trials if _is_better(each, divided)), key=_worth, default=divided)
    return Hindsight(static, divided, search.num_runs)


def divisions(num_workers: int) -> list[Sizes]:
    """Return the ways to divide workers into roles: all both, or so many that prefill and so many that decode."""
    apart = [Sizes(number, num_workers - number) for number in range(1, num_workers)]
    return [Sizes(both=num_workers), *apart]


def _static(search: _Search, policies: Sequence[str], most: int) -> Trial:
    found: list[Trial] = []
    for num_workers in range(most, 0, -1):
        trials = [search.trial(policy, sizes) for sizes in divisions(num_workers) for policy in policies]
        found += trials
        if max(each.good for each in trials) < NEARLY * max(each.good for each in found):
            break
    enough = NEARLY * max(each.good for each in found)
    return min((each for each in found if each.good >= enough), key=lambda each: (each.gpu_hours, -each.good))


def _is_better(one: Trial, other: Trial) -> bool:
    is_cheaper = one.gpu_hours <= CHEAPER * other.gpu_hours and one.good >= SAME * other.good
    return one.good >= MORE * other.good or is_cheaper


def _worth(trial: Trial) -> tuple[int, float]:
    return trial.good, -trial.gpu_hours


def _changes(setup: Setup, trial: Trial, most: int, at_s: float) -> Iterator[Action]:
    """Yield what might be done then to the workers that are there."""
    there = _there(trial)
    roles = sorted({*there.values()}, key=PLANNED_ROLES.index)
    for role in roles:
        newest = max(key for key, each in there.items() if each is role)
        if len(there) > 1:
            yield Drain(at_s, newest)
        for other in roles:
            if other is not role:
                yield Flip(at_s, newest, other)
        if len(there) < most:
            yield Start(max(0.0, at_s - setup.more.start_s), replace(setup.more, role=role))


def _there(trial: Trial) -> Mapping[int, Role]:
    """Return the roles of the workers that are there at last, by number."""
    there = dict(enumerate(_roles(trial.sizes), 1))
    num_ever = len(there)
    for action in trial.actions:
        match action:
            case Start(_, worker):
                num_ever += 1
                there[num_ever] = worker.role
            case Drain(_, worker_id):
                del there[worker_id]
            case Flip(_, worker_id, role):
                there[worker_id] = role
    return there


def _roles(sizes: Sizes) -> list[Role]:
    return [role for role in PLANNED_ROLES for _ in range(sizes.of(role))]
