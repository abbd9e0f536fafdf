"""One worker process: the real core, links and in-process transport; the loop around them as in the real one.

What it wants performed is shown to a `Watcher` first, so that rules can look at every write, note and output.
The clock stands still in a step, so to compute takes no time: whatever can be pulled is.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from late_copier import InOrder, LateCopier
from recurrent_runner import RecurrentRunner, new_states
from windowed_runner import WindowedRunner

from diptych.common.arrays import U64
from diptych.common.members.roles import Role
from diptych.decode.core import DecodeCore
from diptych.engine.cache.host_tier import HostTier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.scheduler.links.links import Links, directions_of
from diptych.engine.scheduler.links.tester import LinkTester
from diptych.engine.scheduler.stepping import OverlappedStepping, Stepping, SynchronousStepping, fill_in
from diptych.engine.values.batch import ForwardBatch, Runner, SamplingBatch, StepResult
from diptych.engine.values.events import (
    AbortRoom,
    CompileGrammar,
    Emit,
    EmitTokens,
    Event,
    GiveCache,
    Move,
    PagesRestored,
    PeerDown,
    PeerUp,
    ServeRole,
    Start,
    ToolCalled,
    Transfer,
)
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.window_pages import WindowPages
from diptych.generation.output import Output
from diptych.kvtransfer.lanes import PathRule
from diptych.kvtransfer.layout import PoolLayout, Region
from diptych.prefill.core import PrefillCore
from diptych.unified.core import UnifiedCore
from simulation.layered_runner import LayeredRunner
from simulation.network import WatchedNetwork
from simulation.requests import CELL_NBYTES, LAYERS, PAGE, VOCAB
from simulation.rules import Watched

CONTEXT = 64
Calculator = LayeredRunner | RecurrentRunner | WindowedRunner


def new_calculator(plain: LayeredRunner, kv: U64, states: U64, windows: WindowPages) -> Calculator:
    """Return what computes on a pool: `plain`, or around it what has states or windows."""
    if windows.num_groups:
        return WindowedRunner(plain, kv, windows, VOCAB)
    return RecurrentRunner(plain, kv, states, VOCAB) if states.size else plain


@dataclass(frozen=True, slots=True)
class Members:
    """The peers that membership knows: instance id -> metadata."""

    metadata: Mapping[int, bytes]


Command = Start | AbortRoom | Members | Move | ServeRole | GiveCache | ToolCalled


class Watcher(Protocol):
    """Sees what a worker is about to do."""

    def wants(self, worker: Watched, effect: Transfer) -> None: ...


class LateModelWorker:
    """Runs steps as late as an overlapping scheduler allows. Stands for `TpModelWorkerClient`, without its thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._jobs: deque[ForwardBatch | SamplingBatch] = deque()
        self._newest = np.empty(0, dtype=np.int64)

    def forward(self, batch: ForwardBatch) -> None:
        self._jobs.append(batch)

    def sample(self, sampling: SamplingBatch) -> None:
        self._jobs.append(sampling)

    def result(self) -> StepResult:
        batch, sampling = self._jobs.popleft(), self._jobs.popleft()
        assert isinstance(batch, ForwardBatch)
        assert isinstance(sampling, SamplingBatch)
        result = self._runner.execute(fill_in(batch, self._newest), sampling)
        self._newest = result.token_ids
        return result

    def close(self) -> None:
        pass


class Worker:
    """A process that somebody else schedules: `receive`, `step`."""

    def __init__(
        self,
        role: str,
        instance_id: int,
        network: WatchedNetwork,
        watcher: Watcher,
        clock: Callable[[], float],
        *,
        meanwhile: Callable[[], None],
        num_pages: int,
        is_unified: bool,
        max_step_tokens: int,
        step_cost: int,
        overlap: bool,
        max_ops: int,
        rules: TransferRules,
        pages_per_state: int,
        windows: WindowPages,
        num_host_slots: int,
        page_size: int,
        rng: random.Random,
    ) -> None:
        self.role = role
        self.instance_id = instance_id
        entries = Region(tuple(range(LAYERS)), 1, 1, 2, "float32", 1)  # a cell for each token and layer
        num_state_cells = pages_per_state * LAYERS * PAGE
        layout = PoolLayout(num_pages, page_size, (entries,), state_nbytes=num_state_cells * CELL_NBYTES)
        self.transport = network.new_transport(instance_id, max_ops)
        pool = self.transport.allocate_pool(layout)
        self.kv = np.frombuffer(pool.buffer, dtype=np.uint64).reshape(-1, LAYERS, page_size)
        cost = PromptCost(step_cost=step_cost)
        limits = Limits(CONTEXT, VOCAB, frozenset(), max_step_tokens, max_requests=6, prompt_cost=cost)
        self.copier = LateCopier(self.kv, num_host_slots, rng)
        self.cache = KvCache(
            num_pages=num_pages,
            page_size=page_size,
            max_requests=6 + PROMPT_ROWS,
            max_tokens_per_request=CONTEXT,
            tiers=[HostTier(num_host_slots, self.copier)] if num_host_slots else [],
            pages_per_state=-(-pages_per_state * PAGE // page_size),
            windows=replace(windows, step_tokens=max_step_tokens),
            pin_share=0.5 * rules.pulls,
        )
        pace = StepPace(limits.mixed_step_s)
        self.core: SchedulerCore
        if is_unified:
            self.core = core = UnifiedCore(self.cache, limits, rules, layout.page_nbytes, Role(role))
            core._pulling._means = replace(core._pulling._means, compute_s=lambda start, count: math.inf)
        elif role == "prefill":
            self.core = PrefillCore(self.cache, limits, rules, layout.page_nbytes, pace)
        else:
            self.core = DecodeCore(self.cache, limits, layout.page_nbytes, pace)
        layers = [(layer, layer + 1) for layer in range(LAYERS)] if rules.by_layers else [(0, LAYERS)]
        directions = directions_of(Role(role), pulls=rules.pulls)
        tester = LinkTester(self.transport, pool, directions, PathRule(), clock)
        self.links = Links(self.transport, self.transport, tester, layers, pulls=rules.pulls)
        self.linked: set[int] = set()  # peers that its core may use
        self.commands: deque[Command] = deque()
        self.outputs: deque[Output] = deque()
        self.is_frozen = False
        self._watcher = watcher
        self._clock = clock
        plain = LayeredRunner(self.kv, self.links.posting.layer_listener, meanwhile)
        states = new_states(self.cache.num_rows, num_state_cells)
        runner = InOrder(new_calculator(plain, self.kv, states, windows), self.copier)
        self._stepping = self._new_stepping(runner, overlap and self.core.can_overlap)

    def _new_stepping(self, runner: Runner, overlap: bool) -> Stepping:
        late_worker: Any = LateModelWorker(runner)
        if overlap:
            return OverlappedStepping(self.core, late_worker, self._clock)
        return SynchronousStepping(self.core, runner, self._clock)

    def receive(self, num_commands: int) -> bool:
        """What the loop does before a step, with the first few commands only: others are still on their way."""
        now_s = self._clock()
        moved = bool(self.commands)
        for _ in range(min(num_commands, len(self.commands))):
            self._on_command(self.commands.popleft(), now_s)
        self.links.linking.reconnect(now_s)
        for event in self.links.poll(self.core.suspects()):
            self._note_link(event)
            self.core.handle(event, now_s)
            moved = True
        for number in self.copier.restored():
            self.core.handle(PagesRestored(number, None), now_s)
            moved = True
        self.core.expire(now_s)
        self._perform()
        return moved

    def stay(self) -> None:
        """Take what others offer again, as one that has come in the place of one that left."""
        if isinstance(self.core, UnifiedCore):
            self.core._giving.is_leaving = False

    def step(self) -> bool:
        """Compute."""
        return self._stepping.advance(self._perform)

    def _note_link(self, event: Event) -> None:
        match event:
            case PeerUp(peer):
                self.linked.add(peer)
            case PeerDown(peer):
                self.linked.discard(peer)

    def _on_command(self, command: Command, now_s: float) -> None:
        if isinstance(command, Members):
            self.links.linking.set_peers(command.metadata, now_s)
        else:
            self.core.handle(command, now_s)
        if isinstance(command, ServeRole):
            self.links.serve(command.role)

    def _perform(self) -> None:
        effects = self.core.pop_effects()
        for effect in effects:
            if isinstance(effect, Emit):
                self.outputs.append(effect.output)
            elif isinstance(effect, EmitTokens):
                self.outputs.extend(effect.outputs())
            else:
                assert not isinstance(effect, CompileGrammar)
                self._watcher.wants(self, effect)
                self.links.posting.perform(effect)

    def next_due_s(self) -> float | None:
        """When something happens by itself."""
        times = [self.core.next_deadline_s(), self.links.linking.next_retry_s()]
        return min((at_s for at_s in times if at_s is not None), default=None)
