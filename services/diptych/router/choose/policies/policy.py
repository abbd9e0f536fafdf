"""What a policy is: a pure choice of one pair out of those that may serve a request, and its reasons as values.

A *policy* looks at pairs. A *worker policy* scores the workers of one role, and `ByRole` makes a policy of it.
Whatever a policy needs comes in as a value, randomness and turns too: same arguments, same answer.

What several share is here, too: how busy a worker is with one kind of leg, and where keys and draws fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from diptych.common.members.roles import LegKind
from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.estimates import UNKNOWN, UNKNOWN_USUAL, RecentMeans, WorkerSpeed
from diptych.router.workers.worker_view import Pair, WorkerLoad

MAX_SHARE: Final = 1.25  # of the mean load: who would have more, with this request, has more than its share
SLACK: Final[Mapping[LegKind, float]] = {LegKind.PREFILL: 8192, LegKind.DECODE: 4}  # and always at least so much
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """What another worker has of a prompt."""

    instance_id: int
    num_tokens: int
    bytes_per_s: float  # from there


class TierLoad(NamedTuple):
    """Part of a prompt that a worker has in a tier, and what it takes to bring that back."""

    tier: str
    start: int  # tokens
    end: int
    load_s: float


class Worker(NamedTuple):
    """A worker at the moment of a decision, as far as it bears on one request."""

    instance_id: int
    load: WorkerLoad
    cached_tokens: int = 0  # leading tokens of the prompt that it is known, or believed, to have
    learned: WorkerSpeed = UNKNOWN
    token_bytes: int = 0  # of KV, a token of its pool
    held: HeldPrefix | None = None  # more of the prompt than it has, at a worker from which it may pull that
    loads: Sequence[TierLoad] = ()  # of `cached_tokens`, what is not in its pool: the last part, tier behind tier

    @property
    def pool_tokens(self) -> int:
        """Return how many leading tokens of the prompt lie in its pool."""
        return self.loads[0].start if self.loads else self.cached_tokens


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    prompt_len: int
    number: int  # counts the choices of this router: whose turn it is among equals
    entropy: int = 0  # 64 random bits
    session: str = ""  # who wants its requests at the same workers; empty: nobody
    prefix_key: int = 0  # hash of the prompt's first tokens
    output_len: float = 0.0  # tokens, as expected
    usual: RecentMeans = UNKNOWN_USUAL
    slo: Slo = NO_SLO


@dataclass(frozen=True, slots=True)
class Candidates:
    """Who may serve a request: at least one pair. Both mappings in a fixed order."""

    workers: Mapping[int, Worker]  # by instance id
    partners: Mapping[int, Sequence[int]]  # of each prefill worker, the decode workers; itself: it may serve alone

    def pairs(self) -> Iterator[Pair]:
        return (Pair(prefill_id, decode_id) for prefill_id, ids in self.partners.items() for decode_id in ids)

    @property
    def decode_ids(self) -> Set[int]:
        """Who may decode."""
        return set().union(*self.partners.values())

    @property
    def busy_share(self) -> float:
        """The share of the prefill workers that have a prompt to compute."""
        return sum(self.workers[key].load.num_queued > 0 for key in self.partners) / len(self.partners)

    def of_prefill(self, prefill_id: int) -> Candidates:
        """Return the pairs of one prefill worker."""
        return Candidates(self.workers, {prefill_id: self.partners[prefill_id]})


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice and its reasons."""

    pair: Pair
    reason: str  # in words
    scores: Mapping[LegKind, Mapping[int, float]] = field(default_factory=dict)  # of the workers that it scored


class Policy(Protocol):
    """Chooses a pair. Pure."""

    def __call__(self, candidates: Candidates, request: RequestView) -> Decision: ...


class WorkerPolicy(Protocol):
    """Scores the workers of one role, as prefill or as decode worker of a request: the lowest wins. Pure."""

    def __call__(self, workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]: ...


def load_of(worker: Worker, request: RequestView, kind: LegKind) -> float:
    """Prefill: tokens that wait to be computed. Decode: requests; infinite where it can't take this one."""
    if kind is LegKind.PREFILL:
        return worker.load.queued_tokens
    has_room = worker.load.has_credit and worker.load.free_tokens >= request.prompt_len
    return worker.load.num_requests if has_room else math.inf


def overloaded(
    workers: Sequence[Worker],
    loads: Sequence[float],
    request: RequestView,
    kind: LegKind,
    max_share: float = MAX_SHARE,
    slack: Mapping[LegKind, float] = SLACK,
) -> Sequence[bool]:
    """Return who has more than its share (Mirrokni, Thorup, Zadimoghaddam 2017: hashing with bounded loads)."""
    usable = [load for load in loads if load < math.inf]
    share = max_share / max(1, len(usable))
    bound = share * sum(usable) + slack[kind]
    added = [_added(worker, request, kind) for worker in workers]
    return [load + own > bound + share * own for load, own in zip(loads, added, strict=True)]


def _added(worker: Worker, request: RequestView, kind: LegKind) -> int:
    """Return by how much this request adds to `load_of` a worker."""
    return max(0, request.prompt_len - worker.cached_tokens) if kind is LegKind.PREFILL else 1


def place(key: int, instance_id: int) -> float:
    """Return where a worker stands for a key, from 0 to 1: the same everywhere, and unrelated for other keys.

    The lowest is the key's worker (rendezvous hashing): when a worker leaves, only its own keys move, evenly to all.
    """
    mixed = (key ^ instance_id * 0x9E3779B97F4A7C15) & _MASK  # then the finaliser of splitmix64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) / 2**64


def draw(worker: Worker, request: RequestView, kind: LegKind) -> float:
    """Return where a worker stands by chance, unrelated for its two roles."""
    return place(request.entropy if kind is LegKind.PREFILL else ~request.entropy, worker.instance_id)
