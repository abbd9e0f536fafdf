"""Unified cores on null models, joined by a network that delivers everything at once, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from null_runner import NullRunner

from diptych.common.arrays import U64
from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tier import Tier
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Turns
from diptych.engine.schedule.running import Drafter
from diptych.engine.scheduler.stepping import OverlappedStepping, Stepping, SynchronousStepping, TpModelWorkerClient
from diptych.engine.values.batch import OverlapRunner
from diptych.engine.values.events import (
    DigestPages,
    Emit,
    EmitTokens,
    NoteArrived,
    PagesDigested,
    PeerUp,
    PrefixHolder,
    SendNote,
    ServeRole,
    Start,
    StreamPages,
    UnpackPages,
    WriteDone,
    WritePages,
)
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.output import Output
from diptych.generation.request_groups import NO_LIFE, Life
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import ContentSegment
from diptych.kvtransfer.digest import add_digests, digest_bytes
from diptych.unified.core import UnifiedCore

VOCAB = 1000
PAGE = 4
CONTEXT = 256
LIMITS = Limits(CONTEXT, VOCAB, frozenset(), max_step_tokens=8, max_requests=8)
NewModel = Callable[[int], tuple[Any, OverlapRunner]]  # by the number of pages: a pool, and what computes on it


def null_model(num_pages: int) -> tuple[Any, OverlapRunner]:
    kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
    return kv, NullRunner(kv, VOCAB)


class Worker:
    """One core with its model and pool."""

    def __init__(
        self,
        role: Role,
        num_pages: int,
        clock: Callable[[], float],
        overlap: bool,
        limits: Limits,
        tiers: Callable[[U64], Sequence[Tier]],
        model: NewModel,
        pages_per_state: int,
        windows: WindowPages,
        drafter: Drafter | None,
        turns: Turns,
    ) -> None:
        self.kv, runner = model(num_pages)
        self.cache = KvCache(
            num_pages=num_pages,
            page_size=PAGE,
            max_requests=8,
            max_tokens_per_request=CONTEXT,
            tiers=tiers(self.kv),
            pages_per_state=pages_per_state,
            windows=replace(windows, step_tokens=limits.max_step_tokens),
            pin_share=0.9,
        )
        rules = TransferRules("always", pulls=True)
        self.core = UnifiedCore(self.cache, limits, rules, self.kv[0].nbytes, role, drafter=drafter, turns=turns)
        self.stepping: Stepping = (
            OverlappedStepping(self.core, TpModelWorkerClient(runner), clock)
            if overlap
            else SynchronousStepping(self.core, runner, clock)
        )
        self.outputs: dict[int, list[Output]] = defaultdict(list)
        self.digests: dict[int, int] = {}


class Fleet:
    """Workers by instance id, 1 and up, each linked to all others."""

    def __init__(
        self,
        *roles: Role,
        num_pages: int = 64,
        clock: Callable[[], float] = lambda: 0.0,
        overlap: bool = False,
        limits: Limits = LIMITS,
        tiers: Callable[[U64], Sequence[Tier]] = lambda kv: (),
        model: NewModel = null_model,
        pages_per_state: int = 0,
        windows: WindowPages = NO_WINDOWS,
        drafter: Drafter | None = None,
        drafters: Sequence[Drafter] = (),
        turns: Turns = ENOUGH_SLOTS,
    ) -> None:
        """`clock` is read when a step is planned and when it has run. `turns`: of all, told apart by their rooms.

        `drafters`: one of each worker, in place of the `drafter` of all.
        """
        guessing: Sequence[Drafter | None] = drafters or [drafter] * len(roles)
        self.workers = {
            number: Worker(
                role, num_pages, clock, overlap, limits, tiers, model, pages_per_state, windows, guesses, turns
            )
            for number, (role, guesses) in enumerate(zip(roles, guessing, strict=True), 1)
        }
        for number, worker in self.workers.items():
            for other in self.workers.keys() - {number}:
                worker.core.handle(PeerUp(other), 0.0)

    def start(self, room: int, prompt: Sequence[int], prefill: int, decode: int, max_tokens: int = 5) -> None:
        """Start both legs, or the only one where both are of the same worker."""
        if prefill == decode:
            self.start_leg(decode, room, prompt, LegKind.LOCAL, 0, max_tokens)
        else:
            self.start_leg(decode, room, prompt, LegKind.DECODE, prefill, max_tokens)
            self.start_leg(prefill, room, prompt, LegKind.PREFILL, decode, max_tokens)

    def start_leg(
        self,
        worker: int,
        room: int,
        prompt: Sequence[int],
        kind: LegKind | None,
        peer: int,
        max_tokens: int = 5,
        life: Life = NO_LIFE,
        holder: PrefixHolder | None = None,
        extra_key: bytes = b"",
        labels: tuple[int, ...] = (),
        contents: Sequence[ContentSegment] = (),
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        tokens = np.array(prompt, dtype=np.int64)
        request = new_request(room, tokens, params, life=life, extra_key=extra_key, labels=labels, contents=contents)
        self.workers[worker].core.handle(Start(request, peer, kind, holder), 0.0)

    def serve(self, worker: int, role: Role) -> None:
        self.workers[worker].core.handle(ServeRole(role), 0.0)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stepping.close()

    def run(self) -> None:
        """Until nothing moves."""
        for _ in range(10_000):
            if not any([self.advance(number) for number in self.workers]):
                return
        raise AssertionError("the workers make no progress")

    def advance(self, number: int) -> bool:
        """Perform what a worker wants, and let it compute a step."""
        worker = self.workers[number]
        worker.core.expire(0.0)
        moved = self.deliver(number)
        busy = worker.stepping.advance(lambda: None)
        assert worker.cache.audit(worker.core.report().holders) == []
        return self.deliver(number) or moved or busy

    def deliver(self, number: int) -> bool:
        worker, moved = self.workers[number], False
        while effects := worker.core.pop_effects():
            moved = True
            for effect in effects:
                self._perform(number, worker, effect)
        return moved

    def _perform(self, number: int, worker: Worker, effect: object) -> None:
        match effect:
            case Emit(output):
                worker.outputs[output.room].append(output)
            case EmitTokens():
                for output in effect.outputs():
                    worker.outputs[output.room].append(output)
            case SendNote(peer, note, stream, digest):
                sent = NoteArrived(number, note, worker.digests.pop(stream, digest))
                self.workers[peer].core.handle(sent, 0.0)
            case WritePages(room, peer, write) | StreamPages(room, peer, write):
                self.workers[peer].kv[write.dst] = worker.kv[write.src]
                digest = _digest(self.workers[peer], write.dst.tolist())
                worker.digests[room] = add_digests(worker.digests.get(room, 0), digest)
                worker.core.handle(WriteDone(room, None, digest), 0.0)
            case DigestPages(room, pages):
                worker.core.handle(PagesDigested(room, _digest(worker, pages.tolist())), 0.0)
            case _:
                assert not isinstance(effect, UnpackPages)

    def tokens(self, room: int) -> list[int]:
        """The client's view."""
        outputs = [output for worker in self.workers.values() for output in worker.outputs[room]]
        merged = {o.first_index + i: token for o in outputs for i, token in enumerate(o.token_ids)}
        return [merged[index] for index in sorted(merged)]

    def failures(self, room: int) -> list[str]:
        outputs = [output for worker in self.workers.values() for output in worker.outputs[room]]
        return [output.failure.message for output in outputs if output.failure]


def _digest(worker: Worker, pages: list[int]) -> int:
    nbytes = worker.kv[0].nbytes
    return add_digests(*(digest_bytes(worker.kv[page].tobytes(), page * nbytes) for page in pages))


@pytest.fixture
def fleet_class() -> type[Fleet]:
    return Fleet
