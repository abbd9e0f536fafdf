"""A worker in virtual time: the real scheduler core, in the loop that a scheduler's process runs.

An iteration hears what has come, plans, computes, commits, and says what is new: see `engine.scheduler.loop`. Only the
computing is a model, of the time that it takes. While a step runs nothing is heard, and what an iteration has to say
goes out at its end, as there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from diptych.common.members.roles import LegKind
from diptych.engine.cache.cache_changes import CacheChanges
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.values.batch import StepResult
from diptych.engine.values.core_report import Load
from diptych.engine.values.events import Effect, Emit, EmitTokens, Event, HandBack, Start
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.step_model import StepShape
from diptych.generation.output import LEAVING, Output
from diptych.generation.request_groups import Account, Life
from diptych.simulator.clock import Clock
from diptych.simulator.decisions import StepRecord
from diptych.simulator.media.tiers import SimTier
from diptych.simulator.messages import Command, NewLeg, News
from diptych.simulator.prompts import OUTPUT_TOKEN
from diptych.simulator.setup import VOCAB_SIZE, Setup, WorkerSetup
from diptych.simulator.sizes import sizes_only
from diptych.simulator.stretch import Launched, Stretch
from diptych.unified.core import UnifiedCore

MIN_STRETCH: Final = 2  # steps


class Posting(Protocol):
    """Whoever carries out transfers, as `links.posting` does."""

    def perform(self, worker: SimWorker, effect: Effect, step_s: float) -> None:
        """`step_s`: of the step that begins now."""
        ...


class SimWorker:
    """One scheduler. Everything happens at the time of `clock`."""

    def __init__(
        self,
        worker_id: int,
        setup: WorkerSetup,
        platform: Setup,
        clock: Clock,
        posting: Posting,
        tell: Callable[[SimWorker, News], None],
        record: StepRecord,
    ) -> None:
        self.worker_id = worker_id
        self.setup = setup
        self.role = setup.role
        self.num_open_pages = 0  # on their way to peers
        self.is_closed = False  # takes nothing new
        self.given: dict[int, int] = {}  # output tokens that have been told of, by room
        self.tiers = [SimTier(each, self.page_nbytes, clock, self.hear) for each in setup.tiers]
        self.cache = KvCache(
            num_pages=setup.num_pages,
            page_size=setup.page_size,
            max_requests=setup.max_requests + PROMPT_ROWS,
            max_tokens_per_request=platform.context_len,
            changes=CacheChanges(),
            pin_share=setup.pin_share,
            tiers=self.tiers,
        )
        self.cache.compute_s = self._compute_s
        limits = Limits(
            *(platform.context_len, VOCAB_SIZE, frozenset(), setup.max_step_tokens, setup.max_requests),
            scheduling=setup.scheduling,
            prompt_cost=setup.prompt_cost,
            mixed_step_s=setup.mixed_step_s,
        )
        self.core = UnifiedCore(self.cache, limits, platform.transfer, self.page_nbytes, setup.role, sizes_only)
        self._clock = clock
        self._posting = posting
        self._tell = tell
        self._record = record
        self._commands: deque[Command] = deque()
        self._events: deque[Event] = deque()
        self._outputs: list[Output] = []
        self._told: tuple[Load, int] | None = None
        self._running: Launched | None = None  # the step that was launched last, and is not committed
        self._is_waiting = False  # for a step
        self._stretch: Stretch | None = None  # of steps that are being computed
        self._is_waking = False
        self._wakes_s = math.inf  # for a deadline
        self._is_dead = False
        self._call_of: dict[int, int] = {}  # of rooms

    @property
    def page_nbytes(self) -> int:
        return self.setup.page_size * self.setup.kv_token_bytes

    @property
    def num_open_rooms(self) -> int:
        """Rooms that are open, or about to be."""
        return self.core.report().num_open_rooms + len(self._commands)

    def _compute_s(self, start: int, end: int) -> float:
        """Return what `PrefillMeter` would, once it knows the steps."""
        if not self.role.serves(LegKind.PREFILL):
            return 0.0
        model, pairs = self.setup.step_model, (end**2 - start**2) / 2
        return float(model.seconds(StepShape(0, 0, end - start, pairs, 1)) - max(model.step, model.prompt_step))

    # what it hears

    def command(self, command: Command) -> None:
        """Hear the router, or the frontend."""
        if isinstance(command, NewLeg) and self.is_closed:
            self._outputs.append(Output(command.room, failure=LEAVING))
        else:
            self._commands.append(command)
        self._wake()

    def hear(self, event: Event) -> None:
        """Hear a link."""
        self._events.append(event)
        self._wake()

    def hand_back(self) -> None:
        """Give up what can be done elsewhere."""
        for room in self._call_of:
            self.command(HandBack(room))

    def die(self) -> None:
        self._say(self.catch_up(self._clock.now_s))
        self._is_dead = True

    def catch_up(self, until_s: float) -> News | None:
        """Have the core where it was then; return what it has said by then that has not been told yet."""
        return self._news() if self._stretch is not None and self._pass(self._stretch, until_s) else None

    def _pass(self, stretch: Stretch, until_s: float) -> bool:
        """Have the core where it was then; return whether it was elsewhere before."""
        count = stretch.num_over(until_s)
        if not count:
            return False
        self.core.pass_plain_steps(*stretch.pop(count), OUTPUT_TOKEN)
        self._record.repeated([self._call_of[room] for room in stretch.rooms], count)
        for room in stretch.rooms:
            self.given[room] += count
        return True

    # the loop

    def _wake(self) -> None:
        if self._stretch is not None:
            if self._stretch.cut(self._clock.now_s):
                self._clock.at(self._stretch.end_s, partial(self._end_stretch, self._stretch))
        elif not self._is_waiting and not self._is_waking:
            self._is_waking = True
            self._clock.after(0.0, self._on_wake)

    def _on_wake(self) -> None:
        self._is_waking = False
        if not self._is_waiting and self._stretch is None and not self._is_dead:
            self._iterate()

    def _iterate(self) -> None:
        """Hear what has come, and begin a step if there is one."""
        now_s, core = self._clock.now_s, self.core
        while self._commands:
            command = self._commands.popleft()
            core.handle(self._start(command) if isinstance(command, NewLeg) else command, now_s)
        while self._events:
            core.handle(self._events.popleft(), now_s)
        core.expire(now_s)
        self._perform(0.0)
        if not self._begin_stretch():
            self._advance()

    # steps: as `engine.scheduler.stepping` advances a core, one after the other or with the next one launched behind it

    def _advance(self) -> None:
        if self._running is not None and not self._overlaps:
            self._when_over(self._running, self._launch)
        else:
            self._launch()

    def _launch(self) -> None:
        """Plan a step behind the one that runs, if one does, and wait for that one."""
        launched, running = self._plan(), self._running
        if running is None:
            self._follow(launched, has_run=False)
        else:
            self._when_over(running, lambda: self._follow(launched, has_run=True))

    def _follow(self, launched: Launched | None, *, has_run: bool) -> None:
        """All steps but the one that was launched last are over."""
        self._running = launched
        if launched is not None and not self._overlaps:
            self._when_over(launched, self._go_round)
        elif launched is not None or has_run:
            self._go_round()
        else:
            self._flush()
            self._sleep()

    def _go_round(self) -> None:
        self._flush()
        self._iterate()

    @property
    def _overlaps(self) -> bool:
        return self.setup.overlap and self.core.can_overlap

    def _plan(self) -> Launched | None:
        """Launch the next step, if there is one."""
        now_s, running = self._clock.now_s, self._running
        batch = self.core.plan(now_s)
        if batch is None:
            self._perform(0.0)
            return None
        step_s = self.setup.step_model.seconds(StepShape.of(batch))
        self._perform(step_s)
        self._record.launched([self._call_of[room] for room in self.core.rooms_of_step()], batch)
        begins_s = now_s if running is None else max(now_s, running.ends_s)
        return Launched(batch.num_samples, begins_s + step_s)

    def _when_over(self, step: Launched, then: Callable[[], None]) -> None:
        """Commit a step when it is over, and go on."""
        self._is_waiting = True
        self._clock.at(step.ends_s, lambda: self._commit(step, then))

    def _commit(self, step: Launched, then: Callable[[], None]) -> None:
        if self._is_dead:
            return
        self._is_waiting = False
        self._running = None
        self.core.commit(StepResult(np.full(step.num_samples, OUTPUT_TOKEN)), self._clock.now_s)
        self._perform(0.0)
        then()

    def _begin_stretch(self) -> bool:
        """Run the plain steps that follow, if there are several. With another one launched behind each, none is."""
        if self.setup.overlap:
            return False
        num_steps, requests = self.core.plain_steps(OUTPUT_TOKEN)
        if num_steps < MIN_STRETCH or self._outputs:  # these are told at the end of the next step
            return False
        lens = {request.room: request.num_tokens for request in requests}
        contexts: Any = sum(lens.values()) + len(lens) * np.arange(num_steps)
        ends_s: Any = self.setup.step_model.seconds(StepShape(len(lens), contexts, 0, 0.0, 0))  # how long each takes
        ends_s[0] += self._clock.now_s
        ends_s.cumsum(out=ends_s)
        deadline_s = self.core.next_deadline_s()
        if deadline_s is not None:  # it is heard behind the step that runs then
            ends_s = ends_s[: int(ends_s.searchsorted(deadline_s)) + 1]
        self._stretch = Stretch(self._clock.now_s, ends_s, tuple(lens))
        self._clock.at(self._stretch.end_s, partial(self._end_stretch, self._stretch))
        return True

    def _end_stretch(self, stretch: Stretch) -> None:
        if self._stretch is not stretch or stretch.end_s > self._clock.now_s or self._is_dead:
            return  # it has been cut, and is over, or goes on
        self._pass(stretch, self._clock.now_s)
        self._stretch = None
        self._go_round()

    def _start(self, leg: NewLeg) -> Start:
        """Return the request of a leg, as `codec.start_from_wire` makes it."""
        self._call_of[leg.room] = leg.call
        room_left, params = max(1, self.core.max_tokens - len(leg.prompt)), leg.params
        request = new_request(
            leg.room,
            leg.prompt.ids,
            params if params.max_tokens <= room_left else replace(params, max_tokens=room_left),
            account=Account(leg.tenant),
            life=Life(arrival_s=self._clock.now_s),
            slo=leg.slo,
            num_prior_output_tokens=leg.num_prior,
        )
        request.page_names = leg.prompt.names(self.setup.page_size).tolist()
        return Start(request, leg.peer_id, leg.kind, leg.holder)

    def _sleep(self) -> None:
        """Nothing is to be done before something comes, or a deadline."""
        deadline_s = self.core.next_deadline_s()
        if deadline_s is not None and deadline_s < self._wakes_s:
            self._wakes_s = deadline_s
            self._clock.at(deadline_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self._wakes_s = math.inf
        self._wake()

    # what it says

    def _perform(self, step_s: float) -> None:
        for effect in self.core.pop_effects():
            match effect:
                case EmitTokens(rooms, indices):
                    for room, index in zip(rooms, indices, strict=True):
                        self.given[room] = index + 1
                case Emit(output):
                    self._emit(output)
                case _:
                    self._posting.perform(self, effect, step_s)

    def _emit(self, output: Output) -> None:
        if output.token_ids:
            self.given[output.room] = output.first_index + len(output.token_ids)
        if output.stats is not None:  # it goes on changing, and is sent as it is now
            output = replace(output, stats=replace(output.stats))
        self._outputs.append(output)

    def _flush(self) -> None:
        self._say(self._news())

    def _say(self, news: News | None) -> None:
        if news is not None:
            self._tell(self, news)

    def _news(self) -> News | None:
        """Return what has not been told yet."""
        busy = self.core.load(), self.num_open_pages
        changes = self.cache.changes
        if busy == self._told and changes.is_empty and not self._outputs:
            return None
        load = None if self._told == busy else busy[0]
        self._told = busy
        cached = None if changes.is_empty else changes.pop()
        outputs, self._outputs = tuple(self._outputs), []
        for output in outputs:
            if output.finish is not None or output.failure is not None:
                self._call_of.pop(output.room, None)
                self.given.pop(output.room, None)
        return News(outputs, load, busy[1], cached)
