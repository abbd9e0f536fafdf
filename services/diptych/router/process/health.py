"""What a router's health port serves: probes, and metrics of this process or of all its processes as one page.

What changes is noted on the event loop, and the page of metrics is made there, so that any thread may ask.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from diptych.common.event_loop import LoopHeartbeat
from diptych.common.health.health import Page, Pages
from diptych.common.members.heartbeat import BEAT_S
from diptych.common.net.reachable import local_host
from diptych.common.verdicts.probes import Probe, Probes, Verdict, judge_loops

DRAINING: Final = Verdict(False, "draining")
CUT_OFF_S: Final = 10.0  # by then a worker that is dead is listed no more
STALL_S: Final = BEAT_S + 1.0  # who asks once a second, and believes the second bad answer, gives it 2 s beyond a beat
TIMEOUT_S: Final = 1.0
MAX_PROBLEM_LEN: Final = 500  # in a router's record, which members are told of
PAGE_TIMEOUT_S: Final = 2.0  # for the metrics of one process
PATH: Final = "/metrics"
TEXT: Final = CONTENT_TYPE_PLAIN_0_0_4
NO_PAGE: Final = (503, "text/plain")


def judge_loop(heartbeat: LoopHeartbeat, clock: Callable[[], float] = time.monotonic) -> Verdict:
    """Tell whether the event loop of a router's process comes round."""
    return judge_loops({"the event loop": clock() - heartbeat.last_s}, STALL_S)


class Pairs(Protocol):
    """What readiness depends on, as `Fleet` says it."""

    def problem(self) -> str | None: ...

    def is_cut_off(self) -> bool: ...

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
        self._listeners: list[Callable[[], None]] = []
        self.probes = Probes(self._live, self._ready, lambda: Verdict(True, "started"), self._answers)

    async def run(self) -> None:
        """Note what changes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeat.run())
            while True:
                self._note()
                await self._fleet.wait_for_change()

    @property
    def problem(self) -> str:
        """Why no pair of workers may serve, in one line; empty: one may."""
        return " ".join((self._problem or "").split())[:MAX_PROBLEM_LEN]

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` when `problem` has changed. It must not block."""
        self._listeners.append(listener)

    def _note(self) -> None:
        before = self._problem
        self._problem = self._fleet.problem()
        if self._problem != before:
            for listener in self._listeners:
                listener()
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
        try:
            status, body = _get(self._host, port, f"/health/{name}", self._timeout_s)
            return Verdict(status == 200, json.loads(body)["reason"])
        except TimeoutError:
            return Verdict(
                False, f"process {self._ports.index(port)} hangs: it has not answered for {self._timeout_s:g} s"
            )
        except (OSError, http.client.HTTPException):
            return None


def judge(answers: Sequence[Verdict], num_processes: int) -> Verdict:
    """Return the first bad answer of those that stay; good ones together are good."""
    staying = [answer for answer in answers if answer != DRAINING]
    bad = next((answer for answer in staying if not answer.is_good), None)
    if bad is not None:
        return bad
    if answers and not staying:
        return DRAINING
    return Verdict(bool(staying), f"{len(staying)} of {num_processes} processes answer")


def page_of_process(loop: asyncio.AbstractEventLoop, exposition: Callable[[], bytes]) -> Pages:
    """Return the page of this process, made on `loop` for askers in other threads."""

    async def made() -> bytes:
        return exposition()

    def page() -> Page:
        try:
            return Page(200, TEXT, asyncio.run_coroutine_threadsafe(made(), loop).result(PAGE_TIMEOUT_S))
        except TimeoutError:
            return Page(*NO_PAGE, b"the event loop does not come round\n")

    return {PATH: page}


class ProcessMetrics:
    """Asks the processes at `ports` of this machine for theirs. Blocks while it does: call it in a thread."""

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._host = local_host(host)
        self._ports = ports

    def pages(self) -> Pages:
        """Return the page of all of them."""
        return {PATH: self._page}

    def exposition(self, known: Mapping[int, bytes]) -> bytes:
        """Return one page, with those that are `known` by their index; who does not answer, or ill, is missing."""
        return merged(self._ask_all(known))

    def _page(self) -> Page:
        pages = self._ask_all({})
        if not any(pages):
            return Page(*NO_PAGE, b"no process of this router answers\n")
        return Page(200, TEXT, merged(pages))

    def _ask_all(self, known: Mapping[int, bytes]) -> list[bytes]:
        return [known.get(index) or _ask(self._host, port) for index, port in enumerate(self._ports)]


def _ask(host: str, port: int) -> bytes:
    """Return the page; nothing where there is none: what is no page of metrics would spoil those of all."""
    try:
        status, page = _get(host, port, PATH, PAGE_TIMEOUT_S)
        return page if status == 200 else b""
    except (OSError, http.client.HTTPException):
        return b""


def _get(host: str, port: int, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Return status and body."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def merged(pages: Sequence[bytes]) -> bytes:
    """Return one page for those of processes 0, 1, ..., with a label `process`."""
    registry = CollectorRegistry()
    registry.register(_Families(pages))
    return generate_latest(registry)


class _Families:
    """A collector of what is on the pages."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for process, page in enumerate(self._pages):
            for found in text_string_to_metric_families(page.decode()):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    labels = {**sample.labels, "process": str(process)}
                    family.add_sample(sample.name, labels, sample.value, sample.timestamp)
        yield from families.values()
