"""Gathers all that a policy may know, as values, and asks it. Pure: whoever holds it tells it who there is.

A router asks for each attempt of a request, the simulator likewise: so both choose the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.common.arrays import U64
from diptych.generation.slo import Slo
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.explain import Selection
from diptych.router.choose.pairing import partners
from diptych.router.choose.policies import Plan
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker
from diptych.router.workers.worker_view import Pair, WorkerLoad


@dataclass(frozen=True, slots=True)
class FoundPrompt:
    """What routing depends on of a prompt: its length, its family, and who has how much of it cached."""

    num_tokens: int
    key: int = 0  # of its beginning
    cached_tokens: Mapping[int, int] = field(default_factory=dict)  # by worker; who has none is left out
    sent: Callable[[Pair], None] = lambda pair: None  # to be called when a pair has been chosen for it
    chains: Mapping[int, U64] = field(default_factory=dict)  # names of its pages, by page size; empty: not read


class Asked(NamedTuple):
    """What routing depends on of a request, beside its prompt."""

    max_tokens: int  # of output
    session: str
    slo: Slo
    expected_tokens: int = 0  # of output, as its client says; 0: nobody said


class State(NamedTuple):
    """A worker at this moment."""

    load: WorkerLoad
    token_bytes: int  # of KV, a token of its pool


class Chooser:
    """Asks policies, one choice after the other."""

    def __init__(self, states: Callable[[int], State], estimates: Estimates, rng: random.Random, number: int) -> None:
        """`states` tells of a worker by its instance id; `number` is that of the first choice: whose turn it is."""
        self._states = states
        self._estimates = estimates
        self._rng = rng
        self.number = number
        self._paired: _Paired = _paired(())  # of the last choice: pairs seldom change

    def choose(self, plan: Plan, pairs: Sequence[Pair], asked: Asked, prompt: FoundPrompt) -> Selection:
        """Return what a request would be sent to now."""
        view, candidates = self._view(asked, prompt), self.candidates(pairs, prompt.cached_tokens)
        return Selection(plan, candidates, view, plan.choose(candidates, view).pair)

    def note(self, selection: Selection, now_s: float) -> None:
        """A request is sent there."""
        self.number += 1
        self._estimates.came(now_s, selection.candidates.busy_share, selection.request.slo)

    def _view(self, asked: Asked, prompt: FoundPrompt) -> RequestView:
        return RequestView(
            prompt_len=prompt.num_tokens,
            number=self.number,
            entropy=self._rng.getrandbits(64),
            session=asked.session,
            prefix_key=prompt.key,
            output_len=min(asked.expected_tokens or self._estimates.output_len, asked.max_tokens),
            usual=self._estimates.usual,
            slo=asked.slo,
        )

    def candidates(self, pairs: Sequence[Pair], cached_tokens: Mapping[int, int]) -> Candidates:
        """Return what there is to choose from, for a prompt that is cached so."""
        if self._paired.pairs is not pairs:
            self._paired = _paired(pairs)
        workers = {key: self._worker(key, cached_tokens.get(key, 0)) for key in self._paired.ids}
        return Candidates(workers, self._paired.partners)

    def _worker(self, instance_id: int, cached_tokens: int) -> Worker:
        load, token_bytes = self._states(instance_id)
        return Worker(instance_id, load, cached_tokens, self._estimates.of(instance_id), token_bytes)


class _Paired(NamedTuple):
    """Pairs by their workers."""

    pairs: Sequence[Pair]
    ids: Sequence[int]  # of all workers
    partners: Mapping[int, Sequence[int]]


def _paired(pairs: Sequence[Pair]) -> _Paired:
    by_prefill = partners(pairs)
    return _Paired(pairs, tuple(dict.fromkeys(itertools.chain(by_prefill, *by_prefill.values()))), by_prefill)
