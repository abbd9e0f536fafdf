"""Chooses the pair for an attempt: waits until there is one, avoids blamed instances, asks the policy.

What is known of the fleet and its caches goes to a `Chooser`, which makes values of it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from diptych.common.arrays import I64, U64
from diptych.common.errors import Unavailable
from diptych.generation import page_hash
from diptych.generation.page_hash import extra_key, prompt_hash
from diptych.generation.segments import content_len, prompt_keys
from diptych.router.choose.breakers import Breakers
from diptych.router.choose.chooser import Asked, Chooser, FoundPrompt, State
from diptych.router.choose.explain import Selection
from diptych.router.choose.page_chain import page_hashes
from diptych.router.choose.pairing import has_fresh, least_blamed
from diptych.router.choose.policies import Plan, plan_of
from diptych.router.choose.policies.outlook import Outlook, outlook_of
from diptych.router.choose.policies.policy import Candidates, Decision
from diptych.router.choose.pools import choose_pool
from diptych.router.choose.seen_prompts import SeenPrompts
from diptych.router.values.failure import LegFailure
from diptych.router.values.progress import Progress
from diptych.router.values.request import GenerationRequest
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.worker_view import Pair

logger = logging.getLogger(__name__)

PREFIX_TOKENS: Final = 256  # of a prompt, that name its family


class Selector:
    """Applies a policy to the pairs of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        breakers: Breakers,
        rng: random.Random,
        seen: SeenPrompts | None = None,
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._estimates = fleet.estimates
        self.breakers = breakers
        self.seen = seen or SeenPrompts()
        self._chooser = Chooser(self._state, self._estimates, rng, rng.getrandbits(32))  # other routers: other turns

    @property
    def number(self) -> int:
        """Which choice the next one is: whose turn it is among equals."""
        return self._chooser.number

    @number.setter
    def number(self, number: int) -> None:
        self._chooser.number = number

    async def select(self, progress: Progress, wait_s: float) -> Selection:
        """Choose a pair whose sessions are open. Raises `Unavailable` if there is none within `wait_s`."""
        everybody = await self._candidates(progress, wait_s)
        now_s = time.monotonic()
        pairs = self.breakers.choose(least_blamed(everybody, progress.blamed), now_s)
        prompt = self._find(progress.request, progress.prompt_ids)
        selection = self._choose(pairs, progress.request, prompt)
        self._fleet.note_attempt(selection.pair)
        self._chooser.note(selection, now_s)
        self.breakers.begin(selection.pair, now_s)
        prompt.sent(selection.pair)
        if progress.is_new:
            self._note(progress.request, prompt, now_s)
        return selection

    async def _candidates(self, progress: Progress, wait_s: float) -> tuple[Pair, ...]:
        """Return the pairs that may serve a request, waiting for one if need be. Raises `Unavailable`."""
        client, fleet = progress.request.client, self._fleet
        adapter, pool = client.hints.adapter, client.routing.pool
        if client.vectors is not None:
            return await fleet.wait_for_singles(wait_s, adapter)
        pairs = await fleet.wait_for(lambda: self._serving(progress.request, progress.blamed), wait_s)
        if not pairs:
            raise Unavailable(fleet.problem(adapter) or _no_pair_words(pool))
        return pairs

    def _serving(self, request: GenerationRequest, blamed: Collection[int]) -> tuple[Pair, ...]:
        """Return the pairs of the pool that serves a request now, where pools are declared; else all."""
        client, fleet = request.client, self._fleet
        adapter, routing = client.hints.adapter, client.routing
        if routing.pool:
            return fleet.by_pool(adapter).get(routing.pool, ())
        if not fleet.pools:
            return fleet.pairs(adapter)
        by_pool = fleet.by_pool(adapter)
        fresh = [name for name, pairs in by_pool.items() if has_fresh(pairs, blamed)]
        key = routing.session or client.life.request_id
        pool = choose_pool(fresh, fleet.pools, key)
        if pool is None:
            pool = choose_pool(by_pool, fleet.pools, key)
        return () if pool is None else by_pool[pool]

    def num_cached(self, progress: Progress) -> int:
        """Return how much of a prompt some worker has cached, as far as is known."""
        found = look_up(self._fleet, progress.request, progress.prompt_ids)
        return max(found.cached_tokens.values(), default=0)

    def predict_ttft(self, request: GenerationRequest) -> float | None:
        """Return when the first token would come if the request were dispatched now; None: nobody knows yet."""
        pairs = self.breakers.choose(self._fleet.pairs(request.client.hints.adapter), time.monotonic())
        if not (pairs and self._estimates.are_measured):
            return None
        selection = self._choose(pairs, request, look_up(self._fleet, request, request.prompt.ids))
        return selection.ttft_s

    def outlook(self) -> Outlook | None:
        """Return what a request that came now would find; None: nobody knows yet."""
        pairs = self.breakers.choose(self._fleet.pairs(""), time.monotonic())
        return outlook_of(self._chooser.candidates(pairs, {})) if pairs and self._estimates.are_measured else None

    def of_move(self, progress: Progress, pair: Pair, reason: str) -> Selection:
        """Return what is known of the workers of a request that goes from one of a pair to the other, with its KV."""
        request, num_tokens = progress.request, progress.prompt_len
        plan = Plan("move", lambda candidates, view: Decision(pair, reason), reads_prompt=False)
        pairs = dict.fromkeys((*self._fleet.pairs(request.client.hints.adapter), pair))
        found = FoundPrompt(num_tokens, cached_tokens={pair.prefill_id: num_tokens})
        self.breakers.begin(pair, time.monotonic())
        return self._chooser.choose(plan, tuple(pairs), self._asked(request), found)

    def candidates(self, adapter: str) -> Candidates | None:
        """Return the workers that may serve, as they are now; None if there are none."""
        pairs = self.breakers.choose(self._fleet.pairs(adapter), time.monotonic())
        return self._chooser.candidates(pairs, {}) if pairs else None

    def successors(self, worker_id: int, adapter: str) -> frozenset[int]:
        """Return who may go on with a worker's requests that have an adapter."""
        pairs = self.breakers.choose(self._fleet.successions(adapter), time.monotonic())
        return frozenset(pair.decode_id for pair in pairs if pair.prefill_id == worker_id)

    @property
    def output_len(self) -> float:
        """Tokens of an output, as expected."""
        return self._estimates.output_len

    def succeeded(self, pair: Pair) -> None:
        """A pair has served a request, as far as it may fail it."""
        self.breakers.succeed(pair)

    def failed(self, pair: Pair, failure: LegFailure) -> None:
        """A pair has failed a request."""
        self._fleet.note_failure(pair)
        for suspect in self.breakers.fail(failure.suspects(pair), time.monotonic()):
            words = str(suspect) if isinstance(suspect, Pair) else f"worker {suspect:016x}"
            logger.warning("leaving %s alone for a while: requests keep failing there", words)

    def has_fresh_pair(self, request: GenerationRequest, blamed: Collection[int]) -> bool:
        """Whether a pair without blamed instances may serve a request now."""
        return has_fresh(self._serving(request, blamed), blamed)

    def _choose(self, pairs: Sequence[Pair], request: GenerationRequest, prompt: FoundPrompt) -> Selection:
        return self._chooser.choose(self._plan_of(request), pairs, self._asked(request), prompt)

    def _note(self, request: GenerationRequest, prompt: FoundPrompt, now_s: float) -> None:
        is_private = bool(request.client.hints.cache_namespace or request.prompt.contents)
        self.seen.note(now_s, prompt.num_tokens, prompt.chains, () if is_private else request.prompt.ids)

    def _plan_of(self, request: GenerationRequest) -> Plan:
        policy = request.client.routing.policy
        return plan_of(policy) if policy else self._plan

    def _find(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> FoundPrompt:
        find = look_up if self._plan_of(request).reads_prompt else measure
        return find(self._fleet, request, prompt_ids)

    def _asked(self, request: GenerationRequest) -> Asked:
        client = request.client
        expected_tokens = client.hints.expected_tokens
        return Asked(request.params.max_tokens, client.routing.session, client.tier.slo, expected_tokens)

    def _state(self, instance_id: int) -> State:
        session = self._fleet.session(instance_id)
        worker = session.worker
        return State(session.load(), worker.token_bytes, worker.linked, worker.lends)


def _no_pair_words(pool: str) -> str:
    if pool:
        return f"no pair of workers in pool {pool!r} may serve"
    return "no pool with a weight above 0 has a pair of workers that may serve"


def measure(fleet: Fleet, request: GenerationRequest, prompt_ids: Sequence[int]) -> FoundPrompt:
    """Return the length of a prompt only: the rest takes time, and not every policy reads it."""
    text = request.prompt.text
    num_tokens = len(prompt_ids) if text is None else fleet.text_index.num_tokens(len(text.utf8))
    return FoundPrompt(num_tokens + content_len(request.prompt.contents))


def look_up(fleet: Fleet, request: GenerationRequest, prompt_ids: Sequence[int]) -> FoundPrompt:
    """Return all that is known of a prompt, by its tokens; or by its text, where the workers tokenise it."""
    namespace = extra_key(request.client.hints.cache_namespace, request.client.hints.adapter)
    if request.prompt.text is not None:
        return _by_text(fleet, request.prompt.text.utf8, namespace)
    if contents := request.prompt.contents:
        return _by_keys(fleet, prompt_keys(np.array(prompt_ids, np.int64), contents), namespace)
    return _by_tokens(fleet, prompt_ids, namespace)


def _by_tokens(fleet: Fleet, prompt_ids: Sequence[int], namespace: bytes) -> FoundPrompt:
    ids = np.asarray(prompt_ids, np.uint32)
    chains = {size: page_hashes(ids, size, namespace) for size in fleet.page_sizes}
    return _found(fleet, len(ids), prompt_hash(ids[:PREFIX_TOKENS].astype(np.int64), namespace), chains)


def _by_keys(fleet: Fleet, keys: I64, namespace: bytes) -> FoundPrompt:
    """Look up a prompt with content: keys have 64 bits, of which the C knows the lower half."""
    chains = {size: page_hash.page_hashes(keys, size, namespace) for size in fleet.page_sizes}
    return _found(fleet, len(keys), prompt_hash(keys[:PREFIX_TOKENS], namespace), chains)


def _found(fleet: Fleet, num_tokens: int, key: int, chains: Mapping[int, U64]) -> FoundPrompt:
    def sent(pair: Pair) -> None:
        fleet.prefixes.sent({pair.prefill_id, pair.decode_id}, chains)

    found = fleet.prefixes.find(chains)
    return FoundPrompt(num_tokens, key, found.num_tokens, sent, chains, found.lower)


def _by_text(fleet: Fleet, utf8: bytes, namespace: bytes) -> FoundPrompt:
    index = fleet.text_index
    chain = index.chain(utf8, namespace)
    found = index.cached_tokens(chain)
    return FoundPrompt(
        index.num_tokens(len(utf8)), index.family(utf8, namespace), found, partial(index.sent, chain=chain)
    )
