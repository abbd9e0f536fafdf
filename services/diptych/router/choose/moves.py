"""Which output should go on at another worker, because its own can't keep the time per token of those it makes. Pure.

Rule: a worker that has been *late* for `WINDOWS` looks in a row, which is when a step of it takes longer than the
tightest time per token of its outputs, gives one away, if another worker keeps all that it then has, with something to
spare, and less is lost by that than is gained. Both are seconds, by the weights of those who wait. Then it is looked at
anew for as long, so that what is gained can be seen. Routers, and the processes of one, take turns: see `is_turn`.

A look costs no more in a fleet where all are late: where nobody has time to spare it ends, and else `MAX_LATE` workers
are looked at, in turn.

An output takes time from prompts where it goes, and gives some back where it was. Unless that is at least as much, all
workers together must have twice the time that prompts take of late: else first tokens would pay for it.

An output never goes to a worker where it was before. The worker that takes it must stay `MARGIN` below what its
outputs allow, and one is late only above: so none goes to and fro.

Outputs of a worker that waits for them to end, as it leaves or becomes another, go to whoever has memory: see
`departures`. What has not gone when its time is over is computed again elsewhere, which costs more than any move. Whom
an output was to go to from where it is, and did not get to, is not asked for it again.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from diptych.generation.slo import Slo
from diptych.router.choose.policies.beside import share_of, step_s
from diptych.router.choose.policies.policy import Candidates, Worker
from diptych.router.workers.worker_view import Pair

Bools = npt.NDArray[np.bool_]

LOOK_S: Final = 0.25  # from one look to the next
WINDOWS: Final = 3  # looks in a row
MARGIN: Final = 0.9  # of the tightest time per token: the most that a step of the new worker may take
GAIN: Final = 2.0  # what is gained must be so many times what is lost
STEPS: Final = 2  # of either worker, that an output stands still for beside its transfer
SHORTLIST: Final = 8  # of outputs, and of workers, that are looked at
MAX_BUSY: Final = 0.5  # of the time that workers have for prompts: if an output takes of it, so much may be needed
MAX_LATE: Final = 4  # workers, of those that are late, at which one look looks closely
TURN_S: Final = 2 * WINDOWS * LOOK_S  # of which the second half is a pause: then the next one sees what was moved
NEW_SHARE: Final = 0.1  # of a look, in the mean of those before: some 2 s
LEAVING, LEAVING_SHARE = 8, 1 / 8  # outputs that leave a worker in one look, or that share of them if that is more
MIN_LEFT: Final = 8  # tokens: an output that has fewer to come ends sooner than it has moved


@dataclass(frozen=True, slots=True)
class RunningOutput:
    """An output that is made now, and could move."""

    worker_id: int
    slo: Slo
    num_tokens: int  # of its context
    num_output_tokens: int
    num_left_at_most: int
    adapter: str = ""
    asked: frozenset[Pair] = frozenset()  # who was to hand it on to whom, with or without success

    @property
    def been(self) -> frozenset[int]:
        """Workers where it was, or was to go."""
        return frozenset(key for pair in self.asked for key in (pair.prefill_id, pair.decode_id))

    @property
    def missed(self) -> frozenset[int]:
        """Workers that it was to go to from where it is, and did not get to."""
        return frozenset(pair.decode_id for pair in self.asked if pair.prefill_id == self.worker_id)

    def num_left(self, usual: float) -> float:
        """Return how many tokens are to come: who has made more than usual makes as many again."""
        return min(self.num_left_at_most, max(usual - self.num_output_tokens, self.num_output_tokens))


class Choice(NamedTuple):
    """An output, by its place among those that were asked about, and where it should go."""

    place: int
    target_id: int
    gain_s: float
    cost_s: float

    @property
    def words(self) -> str:
        return f"its worker was late, and {self.gain_s:.2f} s are gained for {self.cost_s:.2f} s"


class Departure(NamedTuple):
    """An output of a worker that waits for it to end, by its place, and where it should go."""

    place: int
    target_id: int

    @property
    def words(self) -> str:
        return "its worker takes nothing new, and waits for what runs"


class PromptTime(NamedTuple):
    """What workers have of their time for prompts, and what prompts take of late. Both in workers."""

    shares: Mapping[int, float]  # by worker that computes prompts
    taken: float

    def is_enough(self, worker: Worker, output: RunningOutput, target: Worker, num_left: float) -> bool:
        """Whether enough is left when an output goes from a worker to another one."""
        own_s, added = output.slo.tpot_s or math.inf, output.num_tokens + num_left / 2
        after = {
            worker.instance_id: share_of(worker, tightest_s(worker), -output.num_tokens),
            target.instance_id: share_of(target, min(own_s, tightest_s(target)), added),
        }
        gained = sum(share - self.shares[key] for key, share in after.items() if key in self.shares)
        return gained >= 0 or self.taken <= MAX_BUSY * (sum(self.shares.values()) + gained)


class Moves:
    """Says what should move, look by look."""

    def __init__(self) -> None:
        self._windows: Counter[int] = Counter()  # for which workers have been late
        self._busy: dict[int, float] = {}  # of late, with prompts, by worker
        self._last = 0  # worker that was looked at closely

    def due(
        self,
        candidates: Candidates | None,
        outputs: Callable[[Collection[int]], Mapping[int, RunningOutput]],
        successors: Callable[[int, str], Collection[int]],
        usual: float,
        may_leave: Callable[[int], bool] = lambda worker_id: True,
    ) -> list[Choice]:
        """Return one output at most of each worker that was late for long enough, and to each. None: nobody is there.

        `outputs` of some workers, by place, and a worker's `successors` for an adapter, are asked for where somebody is
        late. An output has `usual` tokens. `may_leave`: whether it is our turn to take outputs from a worker.
        """
        if candidates is None:
            return []
        workers, late = candidates.workers, self.late(candidates.workers.values())
        self._note_prompts(candidates)
        late = self._next(list(filter(may_leave, late)))
        free = {key for key, each in workers.items() if step_s(each) <= MARGIN * tightest_s(each)} if late else set()
        if not free:
            return []
        by_worker, time = _by_worker(outputs(late)), self._prompt_time(candidates)
        choices: dict[int, Choice] = {}  # by target
        for key in filter(by_worker.__contains__, late):
            own = by_worker[key]
            allowed = _allowed(key, own, successors)
            ids = free.intersection(itertools.chain(*allowed.values())) - {key, *choices}
            choice = best_move(workers[key], own, {each: workers[each] for each in ids}, allowed, usual, time)
            if choice is not None:
                choices[choice.target_id] = choice
                del self._windows[key]
        return list(choices.values())

    def late(self, workers: Iterable[Worker]) -> list[int]:
        """Look at workers; return who has been late for long enough."""
        late = {worker.instance_id for worker in workers if step_s(worker) > tightest_s(worker)}
        self._windows = Counter({key: self._windows[key] + 1 for key in late})
        return sorted(key for key, count in self._windows.items() if count >= WINDOWS)

    def _next(self, late: list[int]) -> list[int]:
        """Return whose turn it is of those that are late, in order: behind those of the last look."""
        if len(late) > MAX_LATE:
            first = bisect.bisect_right(late, self._last)
            late = [*late[first:], *late[:first]][:MAX_LATE]
            self._last = late[-1]
        return late

    def _note_prompts(self, candidates: Candidates) -> None:
        busy = {key: float(candidates.workers[key].load.num_queued > 0) for key in candidates.partners}
        before = self._busy
        self._busy = {key: now + (1 - NEW_SHARE) * (before.get(key, now) - now) for key, now in busy.items()}

    def _prompt_time(self, candidates: Candidates) -> PromptTime:
        workers = (candidates.workers[key] for key in candidates.partners)
        shares = {worker.instance_id: share_of(worker, tightest_s(worker)) for worker in workers}
        return PromptTime(shares, sum(self._busy[key] * share for key, share in shares.items()))


def departures(
    workers: Mapping[int, Worker],
    outputs: Mapping[int, RunningOutput],
    successors: Callable[[int, str], Collection[int]],
    usual: float,
) -> list[Departure]:
    """Return which outputs of workers that wait for them to end go now, and to which of `workers`.

    Those with most to come go first, some at each look. Each goes where steps are shortest with it and with those that
    went before it; where times per token are not kept only if they are nowhere. Nobody has memory: it waits, and holds
    up no others.
    """
    found: list[Departure] = []
    takers = _Takers(workers)
    for key, own in _by_worker(outputs).items():
        most = max(LEAVING, math.ceil(LEAVING_SHARE * len(own)))
        allowed = {adapter: takers.among(ids) for adapter, ids in _allowed(key, own, successors).items()}
        found += itertools.islice(_departing(own, allowed, takers, usual), most)
    return found


def _departing(
    own: Mapping[int, RunningOutput], allowed: Mapping[str, Bools], takers: _Takers, usual: float
) -> Iterator[Departure]:
    """Yield which outputs of a worker go where, one after another; each is there before the next one is yielded."""
    going = [place for place, output in own.items() if output.num_left_at_most >= MIN_LEFT]
    for place in sorted(going, key=lambda place: own[place].num_left(usual), reverse=True):
        target_id = takers.take(own[place], own[place].num_left(usual), allowed[own[place].adapter])
        if target_id is not None:
            yield Departure(place, target_id)


class _Takers:
    """Workers that outputs go to, with those that do in this look. Arrays are by worker: `[num_workers]`, float64.

    Where nobody has room, all outputs ask all workers at each look: so it is done on arrays.
    """

    def __init__(self, workers: Mapping[int, Worker]) -> None:
        self._ids = sorted(workers)
        each = [workers[key] for key in self._ids]
        self._free = np.array([_free_tokens(worker) for worker in each], np.float64)
        self._growth = np.array([_growth(worker) for worker in each])
        self._tightest_s = np.array([tightest_s(worker) for worker in each])
        self._step_s = np.array([step_s(worker) for worker in each])
        self._token_s = np.array([step_s(worker, 1.0) for worker in each]) - self._step_s

    def among(self, ids: Collection[int]) -> Bools:
        """Return which of the workers are among others, `[num_workers]`."""
        return np.array([key in ids for key in self._ids], np.bool_)

    def take(self, output: RunningOutput, num_left: float, may: Bools) -> int | None:
        """Let an output go to the best of those that may have it, and return who it is; None: none has room."""
        fit = may & (self._free >= output.num_tokens + num_left * self._growth)
        for key in output.missed.intersection(self._ids):
            fit[self._ids.index(key)] = False
        if not fit.any():
            return None
        seconds = self._step_s + self._token_s * (output.num_tokens + num_left / 2)
        in_time = fit & (seconds <= np.minimum(output.slo.tpot_s or math.inf, self._tightest_s))
        best = int(np.where(in_time if in_time.any() else fit, seconds, math.inf).argmin())
        num_tokens = math.ceil(output.num_tokens + num_left)
        self._free[best] -= num_tokens
        self._step_s[best] += self._token_s[best] * num_tokens
        return self._ids[best]


def _allowed(
    worker_id: int, own: Mapping[int, RunningOutput], successors: Callable[[int, str], Collection[int]]
) -> dict[str, Collection[int]]:
    """Return where outputs of a worker may go, by adapter. Each is asked for once: it means a search of the fleet."""
    return {adapter: successors(worker_id, adapter) for adapter in {output.adapter for output in own.values()}}


def is_turn(worker_id: int, place: int, num_routers: int, time_s: float) -> bool:
    """Return whether a router may move outputs away from a worker now: one at a time may, of several.

    `place` among them: routers that know the same others, by nearly the same clock, agree. None knows what the others
    have moved before the worker's load tells it: so a pause follows each turn.
    """
    turn, behind_s = divmod(time_s, TURN_S)
    return num_routers < 2 or ((int(turn) + worker_id) % num_routers == place and behind_s < TURN_S / 2)


def _by_worker(outputs: Mapping[int, RunningOutput]) -> dict[int, dict[int, RunningOutput]]:
    found: dict[int, dict[int, RunningOutput]] = {}
    for place, output in outputs.items():
        found.setdefault(output.worker_id, {})[place] = output
    return found


def tightest_s(worker: Worker) -> float:
    """Return the tightest time per token of a worker's outputs; infinite: nobody said one."""
    return min((slo.tpot_s for slo, _ in worker.load.outputs if slo.tpot_s > 0), default=math.inf)


def best_move(
    worker: Worker,
    outputs: Mapping[int, RunningOutput],
    targets: Mapping[int, Worker],
    allowed: Mapping[str, Collection[int]],
    usual: float,
    time: PromptTime,
) -> Choice | None:
    """Return which of a late worker's outputs gains most by going where; None if none does.

    `outputs` are its own, by place, and `allowed` the targets by adapter; `usual` is how many tokens an output has.
    """
    choices = [
        choice
        for place, output, target in _shortlist(outputs, targets, allowed, usual)
        if time.is_enough(worker, output, target, output.num_left(usual))
        for choice in _worth(place, output, worker, target, output.num_left(usual))
    ]
    return max(choices, key=lambda choice: choice.gain_s - GAIN * choice.cost_s, default=None)


def _shortlist(
    outputs: Mapping[int, RunningOutput],
    targets: Mapping[int, Worker],
    allowed: Mapping[str, Collection[int]],
    usual: float,
) -> Iterator[tuple[int, RunningOutput, Worker]]:
    """Yield which outputs, of those that take most of their worker's time, may go to which of the emptiest workers."""
    longest = heapq.nlargest(SHORTLIST, outputs.items(), key=lambda item: item[1].num_tokens * item[1].num_left(usual))
    emptiest = heapq.nsmallest(SHORTLIST, targets.values(), key=lambda each: (step_s(each), each.instance_id))
    for place, output in longest:
        may = set(allowed.get(output.adapter, ())) - output.been
        yield from ((place, output, target) for target in emptiest if target.instance_id in may)


def _worth(place: int, output: RunningOutput, worker: Worker, target: Worker, num_left: float) -> Iterator[Choice]:
    """Yield what a move comes to, if it is worth it."""
    own_s = output.slo.tpot_s or math.inf
    after_s = step_s(target, output.num_tokens + num_left / 2)
    if after_s > MARGIN * min(own_s, tightest_s(target)) or not _has_memory(target, output, num_left):
        return
    before_s, relieved_s = step_s(worker), step_s(worker, -output.num_tokens)
    relief = _late_s(worker, before_s) - _late_s(worker, relieved_s) + output.slo.weight * max(0.0, relieved_s - own_s)
    sent_s = worker.load.tested_s(target.instance_id, output.num_tokens * worker.token_bytes)
    still_s = sent_s + STEPS * (before_s + after_s)
    choice = Choice(place, target.instance_id, relief * num_left, output.slo.weight * still_s)
    if choice.gain_s > GAIN * choice.cost_s:
        yield choice


def _late_s(worker: Worker, pace_s: float) -> float:
    """Return by how much each token of a worker's outputs comes later than it should, all together."""
    outputs = worker.load.outputs
    return sum(count * slo.weight * max(0.0, pace_s - slo.tpot_s) for slo, count in outputs if slo.tpot_s > 0)


def _has_memory(target: Worker, output: RunningOutput, num_left: float) -> bool:
    """Whether the output and those that are there, or about to be, will have pages, as far as is known."""
    return _free_tokens(target) >= output.num_tokens + num_left * _growth(target)


def _free_tokens(target: Worker) -> float:
    return target.load.free_tokens if target.load.has_credit else -math.inf


def _growth(target: Worker) -> float:
    """Return how many tokens a worker needs for each that an output has to come: others there grow meanwhile."""
    return 1 + target.load.num_outputs / 2
