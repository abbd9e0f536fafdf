"""What is simulated: workers, the router's options, the wire, and what happens to workers at which time. Pure values.

What is not said here is as the product has it by default.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.engine.values.limits import PIN_SHARE, Scheduling
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.step_model import H200_LLAMA_8B, StepModel
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.slo import NO_SLO, Slo
from diptych.planner.values import Limits, Observed, Plan
from diptych.router.admission.queue import AdmissionLimits
from diptych.router.choose.policies import POLICIES
from diptych.router.values.progress import RetryLimits

VOCAB_SIZE: Final = 1 << 31  # names of blocks become tokens: the more there are, the fewer are confused

FCFS: Final = Scheduling()
TRANSFER: Final = TransferRules(num_windows=4)
LIMITS: Final = AdmissionLimits(max_running=1024, max_waiting=256, max_wait_s=5.0)
RETRIES: Final = RetryLimits(first_wait_s=1.5, lost_wait_s=10.0)


@dataclass(frozen=True, slots=True)
class TierSetup:
    """A tier of the prefix cache below the KV pool."""

    name: str = "files"
    num_pages: int = 100_000
    bytes_per_s: float = 5e9  # at which pages come back, one load after the other
    base_s: float = 0.001  # of each load beside


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """One worker. As it is: Llama-3-8B in bfloat16 on an H200."""

    role: Role = Role.UNIFIED
    num_pages: int = 50_000
    page_size: int = 16
    step_model: StepModel = H200_LLAMA_8B
    max_step_tokens: int = 8192
    max_requests: int = 256
    mixed_step_s: float = 0.1
    kv_token_bytes: int = 131_072
    link_bytes_per_s: float = 300e9  # of its port, that all its peers share
    start_s: float = 0.0  # from being asked for to being loaded
    num_gpus: int = 1
    overlap: bool = (
        False  # each step is planned while the one before it runs, as on GPUs; then all are simulated singly
    )
    scheduling: Scheduling = FCFS
    pin_share: float = PIN_SHARE  # of its pages, for sessions that are away; 0: none, and no job goes first
    tiers: tuple[TierSetup, ...] = ()  # in the order in which evicted pages go down

    @property
    def prompt_cost(self) -> PromptCost:
        """Return how the cost of a prompt's tokens grows, as far as the step model knows."""
        model = self.step_model
        return PromptCost(model.prompt_token / model.prompt_pair) if model.prompt_pair else PromptCost()


@dataclass(frozen=True, slots=True)
class Delays:
    """How long messages and discoveries take, in seconds."""

    leg_s: float = 0.0005  # from a router to a worker's scheduler, and back
    note_s: float = 0.00005  # from a worker to another
    link_s: float = 0.05  # until a link between two that know each other is tested
    loss_s: float = 1.0  # until the death of a worker is noticed


@dataclass(frozen=True, slots=True)
class RouterSetup:
    """The router's options."""

    limits: AdmissionLimits = LIMITS
    retries: RetryLimits = RETRIES
    breaker_failures: int = 5
    silence_s: float = 600.0  # without a token
    moves: bool = True  # outputs of late workers go on at others


DELAYS: Final = Delays()
MORE: Final = WorkerSetup(start_s=60.0)
NO_BOUNDS: Final = Limits()
ROUTER: Final = RouterSetup()


class Expectation(enum.Enum):
    """What clients say of the context that a session will come to, when they open it and wait in line for that."""

    NONE = "none"  # they open no sessions
    EXACT = "exact"
    LONGEST = "longest"  # as much as the model takes


@dataclass(frozen=True, slots=True)
class Start:
    """Another worker is asked for; it gets the next number."""

    at_s: float
    worker: WorkerSetup


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker takes nothing new, hands back what has not ended after `within_s`, and goes."""

    at_s: float
    worker_id: int
    within_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker dies with all that it holds."""

    at_s: float
    worker_id: int


@dataclass(frozen=True, slots=True)
class Flip:
    """A worker serves another role, once what it has began in the former one has ended or, after `within_s`, gone."""

    at_s: float
    worker_id: int
    role: Role
    within_s: float = 30.0


Action = Start | Drain | Kill | Flip


class Controller(Protocol):
    """Decides from time to time how many workers of which role there are. It may remember."""

    @property
    def every_s(self) -> float: ...

    def __call__(self, observed: Observed) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """A platform. Its workers are numbered from 1 on."""

    workers: tuple[WorkerSetup, ...]
    policy: str = "pair_cost"
    seed: int = 0  # of all that is drawn
    slo: Slo = NO_SLO
    tiers: Mapping[str, Slo] = field(default_factory=dict)  # objectives by the names that calls ask for
    context_len: int = 131_072
    router: RouterSetup = ROUTER
    delays: Delays = DELAYS
    transfer: TransferRules = TRANSFER
    actions: tuple[Action, ...] = ()
    more: WorkerSetup = MORE  # what a controller gets when it asks for more workers, but for the role
    bounds: Limits = NO_BOUNDS  # of what it may ask for
    sessions: Expectation = Expectation.NONE

    def validate(self) -> None:
        """Raise `ConfigError` for what can't be simulated."""
        if self.policy not in POLICIES:
            raise ConfigError(f"there is no policy {self.policy!r}: use one of {', '.join(sorted(POLICIES))}")
        if not self.workers and not any(isinstance(action, Start) for action in self.actions):
            raise ConfigError("a simulation needs a worker at least")
        for action in self.actions:
            if not action.at_s >= 0:
                raise ConfigError(f"an action happens at 0 s or later, not at {action.at_s:g}")

    def slo_of(self, tier: str) -> Slo:
        """Return what a call asks for that names a tier, or none."""
        return self.tiers.get(tier, self.slo)
