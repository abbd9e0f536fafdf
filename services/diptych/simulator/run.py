"""Simulates a platform that is offered calls: `simulate`. Pure, and deterministic: same arguments, same result."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from diptych.common.arrays import I64
from diptych.router.admission.session_line import share_of
from diptych.simulator.clients.sessions import SessionClients
from diptych.simulator.clock import Clock
from diptych.simulator.control import Control
from diptych.simulator.decisions import Decisions
from diptych.simulator.fleet import Fleet, Member
from diptych.simulator.front import Front
from diptych.simulator.known import Record
from diptych.simulator.messages import Command, News
from diptych.simulator.outcome import Outcome
from diptych.simulator.served import Served
from diptych.simulator.setup import Controller, Setup
from diptych.simulator.traces.call import Call
from diptych.simulator.worker import SimWorker

REST_S: Final = 60.0  # for what workers still do when the last call has ended


class Platform:
    """A router and its workers, and what they say to each other."""

    def __init__(self, setup: Setup, controller: Controller | None = None) -> None:
        setup.validate()
        self.clock = Clock()
        self.decisions = Decisions()
        self._delay_s = setup.delays.leg_s
        self._living: dict[int, SimWorker] = {}
        self.front = Front(setup, self.clock, self.decisions, self._send, self._given, self._catch_up)
        self.fleet = Fleet(setup, self.clock, self.decisions, self._living, self._tell, self._announce)
        self._clients = SessionClients(
            setup.sessions, setup.context_len, self.clock, self._session_tokens, self.front.arrive
        )
        self._control: Control | None = None
        if controller is not None:
            estimates = self.front.workers.estimates
            told = self.front.workers.prefixes.told
            self._control = Control(
                controller, setup, self.fleet, self.clock, lambda: estimates.output_len, told.only_here
            )
            self._every_s = controller.every_s
            self.clock.after(self._every_s, self._round)
        self.fleet.begin()

    def offer(self, calls: Sequence[Call]) -> list[Served]:
        """Let calls arrive at their times, or a while after the end of others."""
        served = [Served(call, number) for number, call in enumerate(calls)]
        before: dict[str, Served] = {}  # by session
        for each in served:
            last = None if math.isnan(each.call.gap_s) else before.get(each.call.session)
            if last is None:
                self.clock.at(each.call.arrival_s, partial(self._arrive, each))
            else:
                last.follower = partial(self._follow, each)
            before[each.call.session] = each
        self._clients.offer(served)
        return served

    def _session_tokens(self) -> int:
        workers = self.fleet.workers.items()
        pool_tokens = {number: each.setup.num_pages * each.setup.page_size for number, each in workers}
        return share_of(self.front.workers.pairs, pool_tokens, (), 0)  # one router, which nobody lists

    def _follow(self, served: Served) -> None:
        """The call before it has ended."""
        at_s = self.clock.now_s + served.call.gap_s
        served.call = replace(served.call, arrival_s=at_s)
        self.clock.at(at_s, partial(self._arrive, served))

    def _arrive(self, served: Served) -> None:
        if self._control is not None:
            self._control.came(served)
        self._clients.arrive(served)

    def _round(self) -> None:
        """Let the controller act; the next round comes as long as the run lasts."""
        assert self._control is not None
        self._catch_up()
        self._control.round()
        self.clock.after(self._every_s, self._round)

    @property
    def living(self) -> Collection[SimWorker]:
        """The workers that are there now."""
        return self._living.values()

    def settle(self, within_s: float = REST_S) -> None:
        """Let workers end what they still do when all calls have ended."""
        until_s = self.clock.now_s + within_s
        while any(worker.num_open_rooms for worker in self._living.values()) and self.clock.now_s < until_s:
            self.clock.step()

    def _send(self, worker_id: int, command: Command) -> None:
        self.clock.after(self._delay_s, lambda: self._deliver(worker_id, command))

    def _deliver(self, worker_id: int, command: Command) -> None:
        if worker_id in self._living:
            self._living[worker_id].command(command)

    def _given(self, worker_id: int, room: int) -> int:
        return self.fleet.workers[worker_id].given.get(room, 0)

    def _tell(self, worker: SimWorker, news: News) -> None:
        self.clock.after(self._delay_s, lambda: self.front.workers.on_news(worker.worker_id, news))

    def _catch_up(self) -> None:
        """Let the router know what it would know by now."""
        until_s = self.clock.now_s - self._delay_s
        for worker in self._living.values():
            news = worker.catch_up(until_s)
            if news is not None:
                self.front.workers.on_news(worker.worker_id, news)

    def _announce(self, member: Member) -> None:
        record = Record(
            member.worker_id, member.setup, member.role, member.state, member.is_paused, frozenset(member.linked)
        )
        if self.clock.now_s:
            self.clock.after(self._delay_s, lambda: self.front.workers.on_record(record))
        else:
            self.front.workers.on_record(record)


def simulate(setup: Setup, calls: Sequence[Call], controller: Controller | None = None) -> Outcome:
    """Return what becomes of calls, on a fleet that a controller changes if there is one.

    Raises `ConfigError` for what can't be simulated.
    """
    platform = Platform(setup, controller)
    served = platform.offer(calls)
    while platform.front.num_ended < len(served):
        is_due = platform.clock.step()
        assert is_due, "calls are open, and nothing is due that could end them"
    return _outcome(platform, served)


def _outcome(platform: Platform, served: Sequence[Served]) -> Outcome:
    def ints(values: Iterable[int]) -> I64:
        return np.array(tuple(values), np.int64)

    return Outcome(
        arrival_s=np.array([each.call.arrival_s - each.line_s for each in served]),
        first_s=np.array([each.first_s for each in served]),
        last_s=np.array([each.last_s for each in served]),
        prefill_id=ints(each.pair.prefill_id for each in served),
        decode_id=ints(each.pair.decode_id for each in served),
        prompt_len=ints(each.call.prompt_len for each in served),
        output_len=ints(each.call.output_len for each in served),
        cached_len=ints(each.cached_len for each in served),
        failure=tuple(each.failure for each in served),
        gpu_s=platform.fleet.gpu_s(),
        num_flips=platform.fleet.num_flips,
        moved_bytes=platform.fleet.wire.moved_bytes,
        num_steps=platform.decisions.num_steps,
        virtual_s=platform.clock.now_s,
        decisions_digest=platform.decisions.digest(),
        num_moves=platform.front.num_moves,
    )
