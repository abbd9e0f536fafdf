"""Gathers all that a policy may know, as values, and asks it. Pure: whoever holds it tells it who there is.

A router asks for each attempt of a request, the simulator likewise: so both choose the same.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.common.arrays import U64
from diptych.generation.slo import Slo
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.explain import Selection
from diptych.router.choose.pairing import partners
from diptych.router.choose.policies import Plan
from diptych.router.choose.policies.policy import Candidates, HeldPrefix, RequestView, TierLoad, Worker
from diptych.router.choose.prefix_index import TierPart
from diptych.router.workers.worker_view import Pair, WorkerLoad

IN_POOL: Final[Sequence[TierLoad]] = ()  # what is cached of a prompt
ALL_IN_POOL: Final[Mapping[int, Sequence[TierPart]]] = {}


@dataclass(frozen=True, slots=True)
class FoundPrompt:
    """What routing depends on of a prompt: its length, its family, and who has how much of it cached."""

    num_tokens: int
    key: int = 0  # of its beginning
    cached_tokens: Mapping[int, int] = field(default_factory=dict)  # by worker; who has none is left out
    sent: Callable[[Pair], None] = lambda pair: None  # to be called when a pair has been chosen for it
    chains: Mapping[int, U64] = field(default_factory=dict)  # names of its pages, by page size; empty: not read
    lower: Mapping[int, Sequence[TierPart]] = field(default_factory=dict)  # parts that lie in tiers, by worker


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
    linked: Set[int] = frozenset()  # workers
    lends: str = ""  # to and from whom it shares cached prefixes: those that say the same; empty: nobody


class Chooser:
    """Asks policies, one choice after the other."""

    def __init__(self, states: Callable[[int], State], estimates: Estimates, rng: random.Random, number: int) -> None:
        """`states` tells of a worker by its instance id; `number` is that of the first choice: whose turn it is."""
        self._states = states
        self._estimates = estimates
        self._rng = rng
        self.number = number
        self._paired: _Paired = _paired(())  # of the last choice: pairs seldom change
        self._told: dict[int, Worker] = {}  # of the last choice, by instance id

    def choose(self, plan: Plan, pairs: Sequence[Pair], asked: Asked, prompt: FoundPrompt) -> Selection:
        """Return what a request would be sent to now."""
        view, candidates = self._view(asked, prompt), self.candidates(pairs, prompt.cached_tokens, prompt.lower)
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

    def candidates(
        self,
        pairs: Sequence[Pair],
        cached_tokens: Mapping[int, int],
        lower: Mapping[int, Sequence[TierPart]] = ALL_IN_POOL,
    ) -> Candidates:
        """Return what there is to choose from, for a prompt that is cached so, in parts in tiers."""
        if self._paired.pairs is not pairs:
            self._paired = _paired(pairs)
        states = {key: self._states(key) for key in self._paired.ids}
        cached = _cached(states, cached_tokens, lower)
        told = self._told
        self._told = {key: self._worker(key, states, cached, told.get(key)) for key in self._paired.ids}
        return Candidates(self._told, self._paired.partners)

    def _worker(self, key: int, states: Mapping[int, State], cached: _Cached, told: Worker | None) -> Worker:
        """Return what is to be known of a worker: `told`, as the choice before was, where that still holds.

        Choices are kept to be explained: a fleet's workers anew for each would be most of what a router keeps.
        """
        state, num_cached, held = states[key], cached.num_tokens.get(key, 0), None
        if state.lends and key in self._paired.partners:
            held = _held(key, states, cached)
        load, learned = state.load, self._estimates.of(key)
        loads = cached.loads.get(key, IN_POOL) if cached.loads else IN_POOL
        is_told = told is not None and told.load is load and told.learned is learned and told.loads == loads
        if told is not None and is_told and told.cached_tokens == num_cached and told.held == held:
            return told if told.token_bytes == state.token_bytes else told._replace(token_bytes=state.token_bytes)
        return Worker(key, load, num_cached, learned, state.token_bytes, held, loads)


class _Cached(NamedTuple):
    """What workers have of a prompt."""

    num_tokens: Mapping[int, int]  # in the pool, and in tiers from which they load
    in_pool: Mapping[int, int]
    loads: Mapping[int, Sequence[TierLoad]]
    holders: Sequence[int]  # who has most in its pool first


def _cached(
    states: Mapping[int, State], cached_tokens: Mapping[int, int], lower: Mapping[int, Sequence[TierPart]]
) -> _Cached:
    in_pool, loads = cached_tokens, dict[int, Sequence[TierLoad]]()
    if lower:
        in_pool = {**cached_tokens, **{key: parts[0].start for key, parts in lower.items()}}
        loads = {key: _loads(states[key].load, parts) for key, parts in lower.items() if key in states}
        cached_tokens = {**in_pool, **{key: each[-1].end for key, each in loads.items() if each}}
    holders = sorted(in_pool.keys() & states.keys(), key=lambda key: -in_pool[key])
    return _Cached(cached_tokens, in_pool, loads, holders)


def _loads(load: WorkerLoad, parts: Sequence[TierPart]) -> Sequence[TierLoad]:
    """Return what loads of parts of a prompt take, up to the first that can't be loaded now."""
    found = list[TierLoad]()
    for level, start, end in parts:
        price = load.tiers[level - 1] if level <= len(load.tiers) else None
        if price is None or price.base_s == math.inf:
            break
        found.append(TierLoad(price.name, start, end, price.load_s(end - start)))
    return tuple(found)


def _held(key: int, states: Mapping[int, State], cached: _Cached) -> HeldPrefix | None:
    """Return who has most of a prompt in its pool, of those that a worker may pull from: they lend nothing else."""
    state = states[key]
    for holder in cached.holders:
        if cached.in_pool[holder] <= cached.num_tokens.get(key, 0):
            break
        if holder in state.linked and states[holder].lends == state.lends:
            return HeldPrefix(holder, cached.in_pool[holder], states[holder].load.link_speed(key))
    return None


class _Paired(NamedTuple):
    """Pairs by their workers."""

    pairs: Sequence[Pair]
    ids: Sequence[int]  # of all workers
    partners: Mapping[int, Sequence[int]]


def _paired(pairs: Sequence[Pair]) -> _Paired:
    by_prefill = partners(pairs)
    return _Paired(pairs, tuple(dict.fromkeys(itertools.chain(by_prefill, *by_prefill.values()))), by_prefill)
