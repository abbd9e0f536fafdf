"""What the planner sees, what it says, and what it remembers. Pure values.

Rule: what nobody knows is `None` or nan, never a number that looks like one. A load of zero is a number: nobody asks
for anything. Loads are offered loads: they count requests when they come, whether or not they are served, and those in
flight, whose outputs are as long as they are expected to become.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych.common.members.roles import Role
from diptych.engine.values.step_model import StepModel

UNBOUNDED: Final = -1  # a prompt budget: a step may take as many tokens of prompts as it can
NEVER: Final = -math.inf  # a time at which something happened that never did


class Sizes(NamedTuple):
    """Workers of each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def serves(self) -> bool:
        """Whether requests can be served at all: somebody computes prompts, and somebody generates."""
        return self.both > 0 or (self.prefill > 0 and self.decode > 0)

    def of(self, role: Role) -> int:
        return self[PLANNED_ROLES.index(role)]

    def of_roles(self, roles: Set[Role]) -> Sizes:
        """Return the same without the workers of other roles."""
        return Sizes(*(self.of(each) if each in roles else 0 for each in PLANNED_ROLES))

    def changed(self, role: Role, number: int) -> Sizes:
        """Return the same with another number of one role."""
        return Sizes(*(number if each is role else self.of(each) for each in PLANNED_ROLES))

    def __str__(self) -> str:
        return f"{self.prefill} prefill, {self.decode} decode, {self.both} both"


PLANNED_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.UNIFIED)  # in the order of `Sizes`
NO_WORKERS: Final = Sizes()


class WorkerState(enum.Enum):
    """How far a worker is, as those see it that run workers."""

    PENDING = "pending"  # asked for; nobody has found a place for it yet
    STARTING = "starting"  # has its GPUs; loads and warms up
    READY = "ready"
    DRAINING = "draining"  # takes nothing new
    FAILED = "failed"  # did not start, or does not start again


class Occupancy(NamedTuple):
    """Who is at a worker and how long they will: those that run, and those that wait there."""

    num_running: int  # requests with KV, whose prompt is computed or being computed
    num_waiting: int
    prompt_tokens_left: int  # not computed yet: of prompts that wait *and* of those that run
    context_tokens: int  # KV of those that run
    output_tokens_left: float  # that all of them will still have, as far as anybody can tell
    longest_wait_s: float = 0.0  # since the arrival of the oldest request without a first token


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker, or one that shall be."""

    worker_id: int
    role: Role
    state: WorkerState
    since_s: float  # when it came into this state
    occupancy: Occupancy | None = None  # None: its metrics are missing
    prompt_budget: int = UNBOUNDED  # tokens of prompts a step
    only_here_tokens: float = 0.0  # that it has cached and nobody else, each as often as it is likely to be found again


class Kind(NamedTuple):
    """Requests that are alike. A load is a list of kinds, as means hide that some prompts are long and most are not."""

    requests_per_s: float
    prompt_len: float  # tokens
    cached_len: float  # of them: found cached
    output_len: float


@dataclass(frozen=True, slots=True)
class Offered:
    """What was asked for over a window that ends now."""

    window_s: float
    kinds: tuple[Kind, ...] | None  # None: the metrics are missing; (): nobody asked for anything

    @property
    def requests_per_s(self) -> float:
        """Return the rate; nan where nobody knows it."""
        return math.nan if self.kinds is None else sum(each.requests_per_s for each in self.kinds)


class Goal(NamedTuple):
    """What service is to be kept, and for how many of those who ask."""

    ttft_s: float = 0.0  # to the first token; 0: any
    tpot_s: float = 0.0  # for each token after it, in a request's mean; 0: any
    share: float = 0.9  # of the *offered* requests that get both


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one worker can do; all are alike."""

    step_model: StepModel
    kv_tokens: int  # that its KV pool holds
    max_step_tokens: int = 8192  # of prompts
    max_requests: int = 256  # that run at once
    kv_token_bytes: float = 0.0  # that a hand-off moves a token
    link_bytes_per_s: float = math.inf
    num_gpus: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What operators allow. A `most` of None is none."""

    least: Sizes = NO_WORKERS  # kept whatever is known or not
    most: Sizes | None = None
    budget_gpus: int | None = None  # that there are for workers; None: can't be read, which is no permission
    may_flip: bool = True  # roles of running workers may change
    stable_s: float = 300.0  # for which a load must have been lower before workers go


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a plan follows from."""

    now_s: float
    workers: tuple[Worker, ...]
    offered: tuple[Offered, ...]  # over several windows, the shortest first
    goal: Goal
    capacity: Capacity
    limits: Limits
    num_queued: int = 0  # requests that no worker has yet
    queued_prompt_tokens: int = 0  # of theirs
    attained: float = math.nan  # share of the requests lately that kept the goal; who waits for longer already did not
    start_s: float = 60.0  # that a worker took from being asked for to being ready, lately
    flip_s: float = 10.0  # that a worker serves less while it changes its role


class Why(enum.Enum):
    """What made the planner decide so; operators count and alert on these."""

    HOLDS = "holds"  # what there is keeps the goal, and one less would not
    IDLE = "idle"
    GROWS = "grows"
    SHRINKS = "shrinks"
    WARMING = "warming"  # what comes is too much, for caches that are cold
    WAITS_TO_SHRINK = "waits_to_shrink"  # needed more lately
    BACKLOG = "backlog"  # what is there already needs more than what comes
    RISING = "rising"  # the load is expected to be higher once new workers are ready
    FLIPS = "flips"
    FLIP_NOT_WORTH = "flip_not_worth"
    FLIP_NOT_SURE = "flip_not_sure"  # not in enough rounds in a row yet
    FLOOR = "floor"
    CEILING = "ceiling"
    BUDGET = "budget"
    BUDGET_UNKNOWN = "budget_unknown"
    LOAD_UNKNOWN = "load_unknown"
    OCCUPANCY_UNKNOWN = "occupancy_unknown"
    UNREACHABLE_TTFT = "unreachable_ttft"  # by any number of workers
    UNREACHABLE_TPOT = "unreachable_tpot"
    STUCK = "stuck"  # workers that nobody finds a place for, or that don't start
    BACKS_OFF = "backs_off"
    CHANGED_BY_OTHERS = "changed_by_others"
    MISSED = "missed"  # measured worse than predicted
    SHEDS = "sheds"


class Reason(NamedTuple):
    """Why, and the same in a sentence with the numbers."""

    why: Why
    words: str


class Flip(NamedTuple):
    """A running worker that shall change its role."""

    worker_id: int
    role: Role


class Admission(NamedTuple):
    """What routers may let in, so that those who are served are served well."""

    requests_per_s: float = math.inf


EVERYBODY: Final = Admission()


@dataclass(frozen=True, slots=True)
class Plan:
    """What shall be. Numbers are of workers that are wanted, those that start among them, those that drain not."""

    prefill: int
    decode: int
    both: int
    roles: tuple[Flip, ...] = ()
    leaving: tuple[int, ...] = ()  # workers that shall go, those first whose going costs least
    budgets: tuple[tuple[int, int], ...] = ()  # worker and the tokens of prompts that a step of it may have
    admission: Admission = EVERYBODY
    reasons: tuple[Reason, ...] = ()

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.prefill, self.decode, self.both)

    @property
    def why(self) -> frozenset[Why]:
        return frozenset(each.why for each in self.reasons)


class Need(NamedTuple):
    """What was asked for at some time, and how much work that is."""

    at_s: float
    kinds: tuple[Kind, ...]
    work: float  # workers that would be busy with it, if steps themselves cost nothing


class Trouble(NamedTuple):
    """Workers could not be had: a bound on how many are asked for, until it is time to try again."""

    role: Role | None  # whose workers do not start; None: no places for any
    placed: int  # workers that there were without those that did not come
    num_failures: int  # in a row
    retry_s: float  # when to ask for more again


@dataclass(frozen=True, slots=True)
class Memory:
    """What the planner must remember from one round to the next. A new planner begins with `Memory()`."""

    began_s: float | None = None  # since when the load is known without a long gap
    known_s: float | None = None  # when it was known last
    needs: tuple[Need, ...] = ()  # of the last rounds, oldest first
    asked: Sizes | None = None  # what the last plan wanted
    shrunk_s: float = NEVER
    flipped_s: float = NEVER
    flip_way: tuple[Role, Role] | None = None  # from which role to which a flip would be worth it
    flip_rounds: int = 0  # for how many rounds in a row
    unknown_since_s: float | None = None  # when the load's metrics went missing
    troubles: tuple[Trouble, ...] = ()
    troubled_ids: frozenset[int] = frozenset()  # workers that did not come, and were counted
    correction: float = 1.0  # by what loads are harder than predicted, as measured
    missed_rounds: int = 0  # in a row in which the goal was missed although it should have been kept
