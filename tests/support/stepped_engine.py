"""A core that serves whole requests, stepped by hand, on a null model or on a given one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flat_request import flat_request
from null_runner import NullRunner
from recurrent_runner import RecurrentRunner, new_states
from windowed_runner import WindowedRunner

from diptych.common.arrays import U64
from diptych.common.members.roles import LegKind, Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.tier import Store, Tier
from diptych.engine.schedule.adapter_turns import ENOUGH_SLOTS, Turns
from diptych.engine.scheduler.stepping import (
    ModelWorker,
    OverlappedStepping,
    Stepping,
    SynchronousStepping,
    TpModelWorkerClient,
)
from diptych.engine.values.batch import OverlapRunner
from diptych.engine.values.events import AbortRoom, CompileGrammar, Emit, EmitTokens, GrammarReady, Start
from diptych.engine.values.limits import PROMPT_ROWS, RETRACTED_S, Limits, Scheduling
from diptych.engine.values.request import Request
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.output import Output
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.compiler import Compiler
from diptych.unified.core import UnifiedCore

VOCAB = 1000
PAGE = 4
CONTEXT = 256


def local_core(cache: KvCache, limits: Limits, turns: Turns = ENOUGH_SLOTS) -> UnifiedCore:
    """Return the core of an engine without peers."""
    return UnifiedCore(cache, limits, TransferRules(), 0, Role.LOCAL, turns=turns)


def _new_runner(
    kv: U64, vocab_size: int, max_requests: int, pages_per_state: int, windows: WindowPages
) -> OverlapRunner:
    stateless = NullRunner(kv, vocab_size)
    if windows.num_groups:
        return WindowedRunner(stateless, kv, windows, vocab_size)
    if not pages_per_state:
        return stateless
    return RecurrentRunner(stateless, kv, new_states(max_requests + PROMPT_ROWS, pages_per_state * PAGE), vocab_size)


class Engine:
    """`outputs` holds what was said of each room. After every step the books are compared."""

    def __init__(
        self,
        num_pages: int = 64,
        max_step_tokens: int = 16,
        max_requests: int = 8,
        scheduling: Scheduling | None = None,
        *,
        overlap: bool = False,
        runner: OverlapRunner | None = None,
        vocab_size: int = VOCAB,
        compiler: Compiler | None = None,
        build: Callable[[KvCache, Limits], SchedulerCore] = local_core,
        kind: LegKind | None = None,
        worker: Callable[[OverlapRunner], ModelWorker] = TpModelWorkerClient,
        mixed_step_s: float = math.inf,
        tiers: Callable[[U64], Sequence[Tier]] = lambda kv: (),
        store: Store | None = None,
        retracted_s: float = RETRACTED_S,
        pages_per_state: int = 0,
        windows: WindowPages = NO_WINDOWS,
        max_drafts: int = 64,
    ) -> None:
        """With `pages_per_state` tokens depend on a state, too; with `windows` on what layers with them keep."""
        kv = np.zeros((num_pages, PAGE), dtype=np.uint64)
        self.cache = KvCache(
            num_pages=num_pages,
            page_size=PAGE,
            max_requests=max_requests + PROMPT_ROWS,
            max_tokens_per_request=CONTEXT,
            tiers=tiers(kv),
            store=store,
            pages_per_state=pages_per_state,
            windows=replace(windows, step_tokens=max_step_tokens),
        )
        limits = Limits(
            CONTEXT,
            vocab_size,
            frozenset(),
            max_step_tokens,
            max_requests,
            scheduling=scheduling or Scheduling(),
            retracted_s=retracted_s,
            mixed_step_s=mixed_step_s,
            max_drafts=max_drafts,
        )
        self.core = build(self.cache, limits)
        self._kind = kind
        self.runner = runner or _new_runner(kv, vocab_size, max_requests, pages_per_state, windows)
        self.outputs: dict[int, list[Output]] = defaultdict(list)
        self._compiler = compiler
        self.now_s = 0.0
        self.num_steps = 0
        self.is_abandoned = False
        self._stepping: Stepping = (
            OverlappedStepping(self.core, worker(self.runner), lambda: self.now_s)
            if overlap
            else SynchronousStepping(self.core, self.runner, lambda: self.now_s)
        )
        self.meter = self._stepping.meter

    def start(self, room: int, prompt: list[int], max_tokens: int, **fields: Any) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return self.start_with(room, prompt, params, **fields)

    def start_with(self, room: int, prompt: list[int], params: SamplingParams, **fields: Any) -> Request:
        request = flat_request(room, np.array(prompt, dtype=np.int64), params, arrival_s=self.now_s, **fields)
        self.core.handle(Start(request, kind=self._kind), self.now_s)
        self.collect()
        return request

    def expect_short_outputs(self) -> None:
        """Let the core learn that outputs are short, so that it admits too much and has to retract."""
        for room in range(10_000, 10_020):
            self.start(room, [1], 1)
        self.run()

    def abort(self, room: int) -> None:
        self.core.handle(AbortRoom(room, "test"), self.now_s)

    def step(self, *, check: bool = True) -> bool:
        self.core.expire(self.now_s)
        busy = self._stepping.advance(self.collect)
        self.num_steps += busy
        self.collect()
        if check:
            assert self.cache.audit(self.core.report().holders) == []
        return busy

    def run(self) -> None:
        while self.step():
            assert self.num_steps < 100_000, "the scheduler makes no progress"

    def collect(self) -> None:
        for effect in self.core.pop_effects():
            if isinstance(effect, CompileGrammar):
                assert self._compiler is not None
                matcher = self._compiler.compile(effect.grammar).matcher()
                matcher.accept(effect.prior_tokens)
                self.core.handle(GrammarReady(effect.room, matcher), self.now_s)
                continue
            if isinstance(effect, EmitTokens):
                for output in effect.outputs():
                    self.outputs[output.room].append(output)
                continue
            assert isinstance(effect, Emit)
            self.outputs[effect.output.room].append(effect.output)

    def tokens(self, room: int) -> list[int]:
        return [token for output in self.outputs[room] for token in output.token_ids]

    def abandon(self) -> None:
        """What it holds can't be accounted for any more, as a test wanted."""
        self.is_abandoned = True
        self._stepping.close()

    def close(self) -> None:
        """Everything has been answered and given back."""
        self._stepping.close()
        counts = self.cache.pool.counts()
        assert self.core.report().num_open_rooms == 0
        assert {state: counts[state] for state in counts if state not in ("free", "cached")} == {
            "owned": 0,
            "importing": 0,
            "quarantined": 0,
            "exporting": 0,
        }
