"""Several schedulers behind one frontend: chooses who computes a request, by the policies of routers.

A request goes to one group, or to a pair: one that computes its prompt, and one that generates. A group that dies takes
its own requests with it, each answered; the others go on. When no group, or no pair, is left, that is the end.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diptych.common.arrays import U64
from diptych.common.errors import DiptychError, InternalError
from diptych.common.members.roles import LegKind
from diptych.embedded.group import Group
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.generation import page_hash
from diptych.generation.codec import content_to_wire, params_to_wire
from diptych.generation.page_hash import extra_key
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment, content_len, prompt_keys, without_pixels
from diptych.router.choose.cached_prefixes import ApproximateIndex
from diptych.router.choose.page_chain import page_hashes
from diptych.router.choose.policies import plan_of
from diptych.router.choose.policies.policy import Candidates, RequestView, Worker
from diptych.router.serve.attempt import Attempt, legs_of
from diptych.router.values.failure import LegFailure
from diptych.router.values.progress import WaitBudget
from diptych.router.workers.legs import Work
from diptych.router.workers.worker_view import Pair
from diptych.tokens.packed_tokens import pack
from diptych.v1.worker_pb2 import StartLeg


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """Tokens, or what stands in place of any."""

    ids: Sequence[int] = ()
    contents: Sequence[ContentSegment] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + content_len(self.contents)

    def page_hashes(self, page_size: int, namespace: bytes) -> U64:
        if not self.contents:
            return page_hashes(np.asarray(self.ids, np.uint32), page_size, namespace)
        keys = prompt_keys(np.array(self.ids, np.int64), self.contents)
        return page_hash.page_hashes(keys, page_size, namespace)


class DataParallelController:
    """Starts requests on the living groups of an engine."""

    def __init__(self, groups: Sequence[Group], policy: str, page_size: int) -> None:
        """`policy` is the name of a router's; `page_size` that of the groups' prefix caches, in tokens."""
        self._groups = {group.instance_id: group for group in groups}
        self._plan = plan_of(policy)
        self._page_size = page_size
        self._cached = ApproximateIndex(time.monotonic, math.inf)
        self._rng = random.Random()
        self._number = 0  # of choices

    def start(self, prompt: EnginePrompt, params: SamplingParams, adapter: str) -> Attempt:
        """Begin a request; `adapter` may be empty. Raises `SchedulerDied` when nobody is left to compute it."""
        partners = self._partners()
        if not partners:
            raise self._death
        pair, work = self._choose(partners, prompt, params.max_tokens, adapter)
        leg = StartLeg(room=secrets.randbits(64) or 1, sampling=params_to_wire(params), lora=adapter)
        parts = legs_of(pair, leg)
        for kind, (_, each) in parts.items():
            known = prompt.contents if kind is not LegKind.DECODE else map(without_pixels, prompt.contents)
            each.contents.extend(map(content_to_wire, known))
        legs = {kind: (self._groups[key], each) for kind, (key, each) in parts.items()}
        packed = StartLeg(prompt_tokens=pack(prompt.ids)).SerializeToString()
        return Attempt(leg.room, legs, packed, work, WaitBudget(math.inf, math.inf, time.monotonic()))

    def error_of(self, failure: LegFailure) -> DiptychError:
        """Return what a program is told of a failure."""
        if failure.session_lost:
            return InternalError(failure.message) if self._partners() else self._death
        error = failure.to_error()
        return type(error)(failure.message) if failure.leg is LegKind.LOCAL else error

    @property
    def _death(self) -> SchedulerDied:
        deaths = [group.death for group in self._groups.values() if group.death is not None]
        return deaths[-1]

    def _partners(self) -> Mapping[int, Sequence[int]]:
        """Return who may decode what each group prefills; one that serves whole requests does so itself."""
        living = [group for group in self._groups.values() if group.death is None]
        alone = {group.instance_id: (group.instance_id,) for group in living if group.role.serves(LegKind.LOCAL)}
        decodes = tuple(group.instance_id for group in living if group.role.serves(LegKind.DECODE))
        prefills = [group.instance_id for group in living if group.role.serves(LegKind.PREFILL)] if decodes else []
        return alone | dict.fromkeys(prefills, decodes)

    def _choose(
        self, partners: Mapping[int, Sequence[int]], prompt: EnginePrompt, output_len: int, adapter: str
    ) -> tuple[Pair, Work]:
        prompt_len = prompt.num_tokens
        if len(self._groups) == 1:
            (only,) = partners
            return Pair(only, only), Work(prompt_len)
        chain = prompt.page_hashes(self._page_size, extra_key(b"", adapter))
        workers = self._workers(chain)
        view = RequestView(prompt_len, self._number, self._rng.getrandbits(64), output_len=output_len)
        self._number += 1
        pair = self._plan.choose(Candidates(workers, partners), view).pair
        for instance_id in {pair.prefill_id, pair.decode_id}:
            self._cached.note(instance_id, chain)
        return pair, Work(prompt_len, workers[pair.prefill_id].cached_tokens)

    def _workers(self, chain: U64) -> Mapping[int, Worker]:
        """Return the living groups as a policy sees them, for a prompt whose pages have these names."""
        found = self._cached.holders(chain)
        living = [(key, group) for key, group in self._groups.items() if group.death is None]
        return {key: Worker(key, group.load, found.get(key, 0) * self._page_size) for key, group in living}
