"""The probes of a router. What changes is noted on the event loop, so that any thread may ask.

Live: the event loop comes round. Ready: it does, a pair of workers may serve, and the router takes requests. It starts
at once: it loads no weights. Answers: it is ready, or was, and no other router would do better now: its 503, which says
when to come again, helps a client more than a Service with nobody behind it.

`ProcessProbes` are those of a router that is several processes: each is asked at its own health port. A process whose
port is closed is being started again and gets no connections: it makes nobody unready, as long as another one answers.
One that answers that it is not well, or not ready, does, and so does one that is silent at its open port, which hangs:
both get their part of the connections. One that is being drained counts as little as one that is gone: it serves
whoever reaches it, and leaves the shared ports before it refuses anybody.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from diptych.common.health.probes import BEAT_S, Probe, Probes, Verdict, judge_loops
from diptych.common.members.heartbeat import LoopHeartbeat
from diptych.common.net.reachable import local_host

DRAINING: Final = Verdict(False, "draining")
CUT_OFF_S: Final = 10.0  # by then a worker that is dead is listed no more
STALL_S: Final = BEAT_S + 1.0  # who asks once a second, and believes the second bad answer, gives it 2 s beyond a beat
TIMEOUT_S: Final = 1.0


def judge_loop(heartbeat: LoopHeartbeat, clock: Callable[[], float] = time.monotonic) -> Verdict:
    """Tell whether the event loop of a router's process comes round."""
    return judge_loops({"the event loop": clock() - heartbeat.last_s}, STALL_S)


class Pairs(Protocol):
    """What readiness depends on."""

    def problem(self) -> str | None:
        """Why no pair may serve; None when one may."""
        ...

    def is_cut_off(self) -> bool:
        """Whether a worker is listed as ready that is not reached: it may be dead, or there for another router."""
        ...

    async def wait_for_change(self) -> None: ...


class RouterHealth:
    """`run` must be running."""

    def __init__(self, fleet: Pairs, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._heartbeat = LoopHeartbeat(clock)
        self._problem: str | None = "it starts"
        self._has_been_ready = False
        self._cut_off_since_s: float | None = None
        self._is_draining = False
        self.probes = Probes(self._live, self._ready, lambda: Verdict(True, "started"), self._answers)

    async def run(self) -> None:
        """Note what changes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeat.run())
            while True:
                self._note()
                await self._fleet.wait_for_change()

    def _note(self) -> None:
        self._problem = self._fleet.problem()
        self._has_been_ready |= self._problem is None
        if not self._fleet.is_cut_off():
            self._cut_off_since_s = None
        elif self._cut_off_since_s is None:
            self._cut_off_since_s = self._clock()

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._is_draining = True

    def _live(self) -> Verdict:
        return judge_loop(self._heartbeat, self._clock)

    def _ready(self) -> Verdict:
        if self._is_draining:
            return DRAINING
        if not (live := self._live()).is_good:
            return live
        return Verdict(self._problem is None, self._problem or "at least one pair of workers is ready")

    def _answers(self) -> Verdict:
        ready = self._ready()
        if ready.is_good or self._is_draining or not self._live().is_good or not self._has_been_ready:
            return ready
        if self._cut_off_since_s is not None and self._clock() - self._cut_off_since_s > CUT_OFF_S:
            return Verdict(False, f"a worker that is listed can't be reached from here: {ready.reason}")
        return Verdict(True, f"answers 503: {ready.reason}")


class ProcessProbes:
    """Asks the processes at `ports` of this machine."""

    def __init__(self, host: str, ports: Sequence[int], live: Probe, timeout_s: float = TIMEOUT_S) -> None:
        """`live` is the parent's own: it ends processes that hang, so nobody needs to restart all of them for one."""
        self._host = local_host(host)
        self._ports = ports
        self._timeout_s = timeout_s
        self.probes = Probes(live, *(partial(self._ask_all, name) for name in ("ready", "startup", "answers")))

    def _ask_all(self, name: str) -> Verdict:
        answers = [self._ask(port, name) for port in self._ports]
        return judge([answer for answer in answers if answer is not None], len(self._ports))

    def _ask(self, port: int, name: str) -> Verdict | None:
        """Return None for a process that is gone."""
        connection = http.client.HTTPConnection(self._host, port, timeout=self._timeout_s)
        try:
            connection.request("GET", f"/health/{name}")
            answer = connection.getresponse()
            return Verdict(answer.status == 200, json.load(answer)["reason"])
        except TimeoutError:
            return Verdict(
                False, f"process {self._ports.index(port)} hangs: it has not answered for {self._timeout_s:g} s"
            )
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def judge(answers: Sequence[Verdict], num_processes: int) -> Verdict:
    """Return the first bad answer of those that stay; good ones together are good."""
    staying = [answer for answer in answers if answer != DRAINING]
    bad = next((answer for answer in staying if not answer.is_good), None)
    if bad is not None:
        return bad
    if answers and not staying:
        return DRAINING
    return Verdict(bool(staying), f"{len(staying)} of {num_processes} processes answer")
