"""What a policy is: a pure choice of one pair out of those that may serve a request, and its reasons as values.

A *policy* looks at pairs. A *worker policy* scores the workers of one role, and `by_role` makes a policy of it.
Whatever a policy needs comes in as a value, randomness and turns too: same arguments, same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from diptych.common.members.roles import LegKind
from diptych.router.choose.estimates import UNKNOWN, UNKNOWN_USUAL, Learned, Usual
from diptych.router.workers.worker_view import Pair, WorkerLoad


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker at the moment of a decision, as far as it bears on one request."""

    instance_id: int
    load: WorkerLoad
    cached_tokens: int = 0  # leading tokens of the prompt that it is known, or believed, to have
    learned: Learned = UNKNOWN
    token_bytes: int = 0  # of KV, a token of its pool


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    prompt_len: int
    number: int  # counts the choices of this router: whose turn it is among equals
    entropy: int = 0  # 64 random bits
    session: str = ""  # who wants its requests at the same workers; empty: nobody
    prefix_key: int = 0  # hash of the prompt's first tokens
    output_len: float = 0.0  # tokens, as expected
    usual: Usual = UNKNOWN_USUAL


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
