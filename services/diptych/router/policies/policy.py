"""What a policy is: a pure choice of one pair out of those that may serve a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.router.worker_view import Pair, WorkerLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that may serve, and how busy its two workers are."""

    pair: Pair
    prefill: WorkerLoad
    decode: WorkerLoad


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    prompt_len: int
    number: int  # counts the choices of this router: the only memory that rotation needs


class Policy(Protocol):
    """Chooses a pair. Pure: same arguments, same answer."""

    def __call__(self, candidates: Sequence[Candidate], request: RequestView) -> Pair:
        """Return the pair of one of `candidates`, of which there is at least one, in the fixed order of `pair_up`."""
        ...
