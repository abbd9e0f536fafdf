"""Workers that come, change their roles, and go, as membership and their frontends have it. The start is a model.

`told` hears of every change that a router may hear of. Rule: a worker is ready once it has a link that its role needs,
or serves alone and has no peers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from diptych.common.members.neighbours import MOVE_LINKS, neighbours
from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.engine.values.events import ServeRole
from diptych.simulator.clock import Clock
from diptych.simulator.decisions import Decisions
from diptych.simulator.messages import News
from diptych.simulator.setup import Action, Drain, Flip, Kill, Setup, Start, WorkerSetup
from diptych.simulator.wire import Wire
from diptych.simulator.worker import SimWorker

ASK_AGAIN_S: Final = 0.05  # whether a worker that is to leave holds requests


@dataclass(slots=True, eq=False)
class Member:
    """A worker as it is listed."""

    worker_id: int
    setup: WorkerSetup
    asked_s: float
    role: Role
    state: State = State.STARTING
    is_paused: bool = False
    linked: set[int] = field(default_factory=set)
    since_s: float = 0.0  # it is in this state
    gone_s: float | None = None
    flips_to: Role | None = None  # the role that it is about to serve

    @property
    def serves_next(self) -> Role:
        """What it serves once it has done what it was asked for."""
        return self.flips_to or self.role

    def enter(self, state: State, now_s: float) -> None:
        self.state, self.since_s = state, now_s


class Fleet:
    """All workers that there ever were. It keeps `living`, by number: those that have loaded."""

    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        decisions: Decisions,
        living: dict[int, SimWorker],
        tell: Callable[[SimWorker, News], None],
        told: Callable[[Member], None],
    ) -> None:
        self._setup = setup
        self._clock = clock
        self._decisions = decisions
        self._tell = tell
        self._told = told
        self.members: dict[int, Member] = {}
        self.workers: dict[int, SimWorker] = {}  # all that have ever loaded
        self.living = living
        self.wire = Wire(clock, setup.delays, setup.transfer.num_windows, living)
        self.num_flips = 0

    def begin(self) -> None:
        """Start what there is from the beginning; those that need no time know each other at once."""
        for worker in self._setup.workers:
            self._start(worker)
        for action in self._setup.actions:
            self._clock.at(action.at_s, partial(self.act, action))

    def act(self, action: Action) -> None:
        """Do something to a worker. What is gone already is left alone."""
        if isinstance(action, Start):
            self._start(action.worker)
            return
        member = self.members[action.worker_id]
        if member.worker_id not in self.living:
            if member.state is State.STARTING and isinstance(action, Drain | Kill):
                self._cancel(member)
            return
        match action:
            case Drain(_, _, within_s):
                self._drain(member, within_s)
            case Kill():
                self._kill(member)
            case Flip(_, _, role, within_s):
                self._flip(member, role, within_s)

    def gpu_s(self) -> float:
        """Return for how long GPUs have been held, in all."""
        ends = ((each, self._clock.now_s if each.gone_s is None else each.gone_s) for each in self.members.values())
        return sum((end_s - each.asked_s) * each.setup.num_gpus for each, end_s in ends)

    # coming

    def _start(self, setup: WorkerSetup) -> None:
        worker_id = len(self.members) + 1
        self.members[worker_id] = member = Member(
            worker_id, setup, self._clock.now_s, setup.role, since_s=self._clock.now_s
        )
        self._told(member)
        if setup.start_s:
            self._clock.after(setup.start_s, lambda: self._loaded(member))
        else:
            self._loaded(member)

    def _cancel(self, member: Member) -> None:
        """A worker that has not loaded goes at once."""
        self._decisions.changed(member.worker_id, "never came")
        member.enter(State.GONE, self._clock.now_s)
        member.gone_s = self._clock.now_s
        self._told(member)

    def _loaded(self, member: Member) -> None:
        if member.state is State.GONE:
            return
        self._decisions.changed(member.worker_id, "loaded")
        record = self._decisions.of_worker(member.worker_id)
        worker = SimWorker(member.worker_id, member.setup, self._setup, self._clock, self.wire, self._tell, record)
        self.living[member.worker_id] = self.workers[member.worker_id] = worker
        self._meet(member)

    def _meet(self, member: Member) -> None:
        """Link a worker with those that its role exchanges KV with, and unlink it from others."""
        delay_s = self._setup.delays.link_s if self._clock.now_s else 0.0  # a platform is there from the beginning
        wanted = self._wanted(member)
        for other_id in self.living:
            other = self.members[other_id]
            if other is member or other.state is State.DRAINING:
                continue
            linked = other_id in member.linked
            if other_id in wanted and not linked:
                self._clock.after(delay_s, partial(self._link, member, other))
            elif linked and other_id not in wanted:
                self._unlink(member, other, "it is no peer any more")
        self._become_ready(member)

    def _wanted(self, member: Member) -> set[int]:
        """Return with whom a worker should have links: for prompts, and to neighbours for requests that run."""
        roles = {each: self.members[each].role for each in self.living if each != member.worker_id}
        peers = {each for each, role in roles.items() if member.role.exchanges_with(role)}
        beside = {each for each, role in roles.items() if member.role.hands_on_to(role)} - peers
        most = MOVE_LINKS if self._setup.router.moves else 0
        return peers | neighbours(member.worker_id, beside, most) | member.linked & beside

    def _link(self, one: Member, other: Member) -> None:
        ids = {one.worker_id, other.worker_id}
        has_use = one.role.exchanges_with(other.role) or one.role.hands_on_to(other.role)  # one may have flipped since
        if not (has_use and ids <= self.living.keys()) or other.worker_id in one.linked:
            return
        one.linked.add(other.worker_id)
        other.linked.add(one.worker_id)
        self.wire.link(self.living[one.worker_id], self.living[other.worker_id])
        for each in (one, other):
            self._become_ready(each)
            self._told(each)

    def _unlink(self, one: Member, other: Member, reason: str) -> None:
        one.linked.discard(other.worker_id)
        other.linked.discard(one.worker_id)
        self.wire.unlink(one.worker_id, other.worker_id, reason)
        self._told(one)
        self._told(other)

    def _become_ready(self, member: Member) -> None:
        serves_alone = member.role is Role.UNIFIED and len(self.living) == 1
        has_peer = any(member.role.exchanges_with(self.members[each].role) for each in member.linked)
        if member.state is State.STARTING and (has_peer or serves_alone):
            member.enter(State.READY, self._clock.now_s)
            self._told(member)

    # going

    def _drain(self, member: Member, within_s: float) -> None:
        if member.state is State.DRAINING:
            return
        self._decisions.changed(member.worker_id, "drains")
        member.enter(State.DRAINING, self._clock.now_s)
        self._vacate(member, within_s, lambda: self._leave(member))

    def _vacate(self, member: Member, within_s: float, then: Callable[[], None]) -> None:
        """Take nothing new, hand back what has not ended after a while, and go on when nothing is left."""
        worker = self.living[member.worker_id]
        worker.is_closed = True
        self._told(member)
        self._when_empty(worker, self._clock.now_s + within_s, then)

    def _when_empty(self, worker: SimWorker, hand_back_s: float, then: Callable[[], None]) -> None:
        if self.living.get(worker.worker_id) is not worker:
            return
        if not worker.num_open_rooms:
            then()
            return
        if self._clock.now_s >= hand_back_s:
            worker.hand_back()
            hand_back_s = math.inf
        next_s = min(self._clock.now_s + ASK_AGAIN_S, hand_back_s)
        self._clock.at(next_s, lambda: self._when_empty(worker, hand_back_s, then))

    def _leave(self, member: Member) -> None:
        self._decisions.changed(member.worker_id, "gone")
        member.enter(State.GONE, self._clock.now_s)
        member.gone_s = self._clock.now_s
        self._lose_links(member, "it has left")
        del self.living[member.worker_id]
        self._told(member)
        self._look_around()

    def _kill(self, member: Member) -> None:
        """Nobody knows at first."""
        self._decisions.changed(member.worker_id, "died")
        self.living.pop(member.worker_id).die()
        member.gone_s = self._clock.now_s
        self._clock.after(self._setup.delays.loss_s, lambda: self._bury(member))

    def _bury(self, member: Member) -> None:
        member.enter(State.GONE, self._clock.now_s)
        self._lose_links(member, "it has died")
        self._told(member)
        self._look_around()

    def _lose_links(self, member: Member, reason: str) -> None:
        for other_id in sorted(member.linked):
            self._unlink(member, self.members[other_id], reason)

    def _look_around(self) -> None:
        """Somebody has gone: others have new neighbours, and who is left alone may serve alone."""
        for other_id in sorted(self.living):
            if self.members[other_id].state is not State.DRAINING:
                self._meet(self.members[other_id])

    # roles

    def _flip(self, member: Member, role: Role, within_s: float) -> None:
        if role is member.role or member.is_paused or member.state is not State.READY:
            return
        self._decisions.changed(member.worker_id, f"serves {role.value}")
        member.is_paused, member.flips_to = True, role
        self._vacate(member, within_s, lambda: self._serve(member, role))

    def _serve(self, member: Member, role: Role) -> None:
        if member.state is not State.READY:  # it drains by now
            return
        worker = self.living[member.worker_id]
        worker.is_closed, worker.role = False, role
        worker.command(ServeRole(role))
        member.role, member.is_paused, member.flips_to = role, False, None
        self.num_flips += 1
        self._meet(member)
        self._told(member)
