"""Workers as the router in virtual time knows them: what they are, what they told, and the legs that are open there.

The counterpart of `router.workers.fleet` and its sessions. Everything here happens when it has reached the router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.common.members.terms import FEATURES, Terms
from diptych.engine.scheduler.codec import output_to_wire
from diptych.router.choose.cached_prefixes import LATELY_S, ApproximateIndex, CachedPrefixes
from diptych.router.choose.chooser import State as StateNow
from diptych.router.choose.estimates import Estimates
from diptych.router.choose.pairing import is_missing, pair_up, successions, vacating
from diptych.router.choose.prefix_index import KvNews, PrefixIndex
from diptych.router.workers.known_worker import counted_load
from diptych.router.workers.learning import learn
from diptych.router.workers.legs import OpenLegs
from diptych.router.workers.worker_view import Pair, WorkerLoad, WorkerView
from diptych.simulator.messages import News
from diptych.simulator.setup import WorkerSetup

MODEL: Final = "simulated"
_TERMS: Final = Terms(features=FEATURES)


@dataclass(frozen=True, slots=True)
class Record:
    """What a worker says of itself, at one moment."""

    worker_id: int
    setup: WorkerSetup
    role: Role
    state: State
    is_paused: bool
    linked: frozenset[int]


@dataclass(slots=True, eq=False)
class Known:
    """One worker."""

    record: Record
    link_speeds: Mapping[int, float]  # bytes/s to peers
    reported: WorkerLoad
    legs: OpenLegs = field(default_factory=OpenLegs)
    num_news: int = 0  # of its cache

    def view(self) -> WorkerView:
        record = self.record
        return WorkerView(
            record.worker_id,
            record.role,
            record.state,
            MODEL,
            _TERMS,
            session_open=record.state >= State.READY,
            linked=record.linked,
            paused=record.is_paused,
        )

    def load(self) -> WorkerLoad:
        return self.legs.load(self.reported)


class KnownWorkers:
    """All workers, and what has been learned of them. `on_change` hears that others may serve together now."""

    def __init__(self, clock: Callable[[], float], on_change: Callable[[], None], lends: str = "") -> None:
        """`lends`: as in the state of each worker."""
        self._clock = clock
        self._lends = lends
        self._on_change = on_change
        self._known: dict[int, Known] = {}
        self._pairs: tuple[Pair, ...] | None = None  # None after a change
        self.estimates = Estimates()
        self.prefixes = CachedPrefixes(PrefixIndex(), ApproximateIndex(clock), ApproximateIndex(clock, LATELY_S))
        self.missing_since_s: float | None = None  # since when no worker of some role is listed

    def __getitem__(self, worker_id: int) -> Known:
        return self._known[worker_id]

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self._known

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The pairs that may serve now."""
        if self._pairs is None:
            self._pairs = pair_up(self._views(), MODEL)
        return self._pairs

    @property
    def successions(self) -> tuple[Pair, ...]:
        """Who may go on with requests that run at whom."""
        return successions(self._views(), MODEL)

    @property
    def vacating(self) -> frozenset[int]:
        """The workers that wait for the outputs that they make to end."""
        return vacating(self._views())

    @property
    def page_sizes(self) -> frozenset[int]:
        return frozenset(known.record.setup.page_size for known in self._known.values())

    def state(self, worker_id: int) -> StateNow:
        """Return what a choice asks of a worker."""
        known = self._known[worker_id]
        return StateNow(known.load(), known.record.setup.kv_token_bytes, known.record.linked, self._lends)

    # what they say

    def on_record(self, record: Record) -> None:
        """A worker has changed."""
        link_speeds = dict.fromkeys(sorted(record.linked), record.setup.link_bytes_per_s)
        if record.state is State.GONE:
            self._forget(record)
        elif record.worker_id in self._known:
            known = self._known[record.worker_id]
            known.record, known.link_speeds = record, link_speeds
        else:
            self._known[record.worker_id] = Known(record, link_speeds, WorkerLoad(0, 0, 0))
        is_loaded = record.state in (State.READY, State.DRAINING)
        if is_loaded and not self._known[record.worker_id].num_news:
            self._known[record.worker_id].num_news = 1
            self.prefixes.told.apply(record.worker_id, KvNews(1, cleared=True))
        if not is_missing(self._views()):
            self.missing_since_s = None
        elif self.missing_since_s is None:
            self.missing_since_s = self._clock()
        self._pairs = None
        self._on_change()

    def on_news(self, worker_id: int, news: News) -> None:
        """An iteration of a worker's scheduler has said something."""
        known = self._known.get(worker_id)
        if known is None:
            return
        now_s = self._clock()
        for output in news.outputs:
            wire = output_to_wire(output)
            leg = known.legs.deliver(wire, now_s)
            if leg is not None and wire.finish_reason:
                learn(self.estimates, worker_id, known.load, leg, wire, now_s)
        if news.load is not None:
            setup = known.record.setup
            num_bytes = news.num_open_pages * setup.page_size * setup.kv_token_bytes
            budget = news.load.prompt_budget
            known.legs.told()
            known.reported = counted_load(news.load, setup.page_size, budget, num_bytes, known.link_speeds)
        if news.cached is not None:
            known.num_news += 1
            delta = news.cached
            is_first = known.num_news == 1
            news_of_cache = KvNews(known.num_news, is_first, delta.removed, delta.stored, below=delta.below)
            self.prefixes.told.apply(worker_id, news_of_cache)

    def _forget(self, record: Record) -> None:
        """A worker is gone: whoever has a leg there hears of it."""
        known = self._known.pop(record.worker_id, None)
        if known is None:
            return
        self._pairs = None
        self.prefixes.forget(record.worker_id)
        self.prefixes.told.forget(record.worker_id)
        self.estimates.forget(record.worker_id)
        known.legs.lose_all(f"worker {record.worker_id} is gone")

    def _views(self) -> list[WorkerView]:
        return [known.view() for known in self._known.values()]
