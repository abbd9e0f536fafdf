"""What a scheduler says of itself: what has changed, unasked, and its whole status when somebody asks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from diptych.engine.cache import kv_codec
from diptych.engine.schedule import step_codec
from diptych.engine.scheduler import codec
from diptych.engine.scheduler.lasting import NO_LASTING_TIERS, LastingTiers
from diptych.engine.values.batch import NO_GRAPHS, GraphUse, ImageCounts
from diptych.v1 import bootstrap_pb2, engine_pb2
from diptych.v1.worker_pb2 import FileTierStatus, WorkerStatus

if TYPE_CHECKING:
    from diptych.engine.cache.kv_cache import KvCache
    from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
    from diptych.engine.scheduler.adapters import Adapters
    from diptych.engine.scheduler.links.links import Links
    from diptych.engine.tiers.lasting_tier import LastingTier
    from diptych.engine.tiers.shared_tier import SharedTier
    from diptych.engine.values.core_report import Load
    from diptych.engine.values.scheduler_core import SchedulerCore


class WeightCopies(Protocol):
    """How weights have come and gone between workers, since start."""

    @property
    def taken_nbytes(self) -> int: ...

    @property
    def num_failed(self) -> int:
        """Workers that were asked in vain."""
        ...

    @property
    def num_given(self) -> int:
        """Streams that others took, whole."""
        ...


class News:
    """Tells what changed in one scheduler, and remembers what it said last."""

    def __init__(
        self,
        core: SchedulerCore,
        cache: KvCache,
        links: Links,
        adapters: Adapters[Any],
        meter: PrefillMeter,
        graph_use: Callable[[], GraphUse] = lambda: NO_GRAPHS,
        lasting: LastingTiers = NO_LASTING_TIERS,
        copies: WeightCopies | None = None,
        images: Callable[[], ImageCounts] = ImageCounts,
    ) -> None:
        self._core = core
        self._cache = cache
        self._links = links
        self._adapters = adapters
        self._meter = meter
        self._graph_use = graph_use
        self._lasting = lasting
        self._copies = copies
        self._images = images
        self._load: Load | None = None  # that was told last
        self._told = bootstrap_pb2.WorkerLoad()  # in these words
        self._link_load: bootstrap_pb2.WorkerLoad | None = None  # the part that is about links
        self._queued = 0  # bytes of transfers
        self._problem = ""  # of the links
        self._max_tokens = core.max_tokens
        self._audited_s = -math.inf  # when the cache was last audited
        self._problems: Sequence[str] = ()  # that were found then

    def report(self, events: engine_pb2.SchedulerEvents) -> None:
        """Add what has changed since the last call."""
        self._report_load(events)
        if self._core.max_tokens != self._max_tokens:
            self._max_tokens = events.context_len = self._core.max_tokens
        if not self._cache.changes.is_empty:
            events.kv_events.CopyFrom(kv_codec.delta_to_wire(self._cache.changes.pop()))
        if (adapters := self._adapters.news()) is not None:
            events.loras.CopyFrom(engine_pb2.LoraSet(adapters=adapters))

    def status(self) -> WorkerStatus:
        """Return all of it. The cache is audited, which takes a while in a large pool."""
        status = self.light_status(0.0, time.monotonic())
        status.MergeFrom(self.links_status())
        return status

    def light_status(self, max_audit_age_s: float, now_s: float) -> WorkerStatus:
        """Return what is said soon: without links, and with what an audit found that is not older than that."""
        status = self._core_status(max_audit_age_s, now_s)
        status.MergeFrom(self._cache_status())
        status.MergeFrom(self._steps_status())
        status.MergeFrom(self._copies_status())
        return status

    # what has changed

    def _report_load(self, events: engine_pb2.SchedulerEvents) -> None:
        load, links, queued = self._core.load(), self._links.load, self._links.queued_bytes
        if self._load is None or links is not self._link_load:
            self._told, self._link_load = codec.load_to_wire(load, links), links
            self._report_problem(events)
        elif queued == self._queued and load == self._load:
            return
        else:
            codec.change_load(self._told, self._load, load)
        self._told.queued_transfer_bytes = queued
        self._load, self._queued = load, queued
        events.load.CopyFrom(self._told)

    def _report_problem(self, events: engine_pb2.SchedulerEvents) -> None:
        if self._links.linking.problem != self._problem:
            self._problem = self._links.linking.problem
            events.link_news.CopyFrom(engine_pb2.LinkNews(problem=self._problem))

    # the status

    def _core_status(self, max_audit_age_s: float, now_s: float) -> WorkerStatus:
        """Every counter of a core has the name of its field."""
        report = self._core.report()
        since_s = report.quarantined_since_s
        if now_s - self._audited_s >= max_audit_age_s:
            self._audited_s, self._problems = now_s, self._cache.audit(report.holders)
        return WorkerStatus(
            open_rooms=report.num_open_rooms,
            leaks_found=len(self._problems),
            problems=self._problems,
            quarantine_oldest_s=0.0 if since_s is None else now_s - since_s,
            drafting=codec.drafts_to_wire(report.drafts),
            **asdict(report.counts),
        )

    def _cache_status(self) -> WorkerStatus:
        lasting = self._lasting
        return WorkerStatus(
            pages_by_state=self._cache.pool.counts(),
            host_pages=self._cache.tree.num_host_pages,
            host_pages_saved=self._cache.moves.num_saved,
            host_pages_restored=self._cache.moves.num_restored,
            cache=codec.cache_to_wire(self._cache.report()),
            files=None if lasting.files is None else self._tier_status(lasting.files),
            shared=None if lasting.shared is None else self._shared_status(lasting.shared),
        )

    def _copies_status(self) -> WorkerStatus:
        copies = self._copies
        if copies is None:
            return WorkerStatus()
        return WorkerStatus(
            weights_taken_bytes=copies.taken_nbytes,
            weights_givers_failed=copies.num_failed,
            weights_given=copies.num_given,
        )

    def _shared_status(self, shared: SharedTier) -> FileTierStatus:
        status, asked = self._tier_status(shared), shared.asked
        status.lookups, status.lookups_failed, status.runs_found = asked.num_lookups, asked.num_failed, asked.num_runs
        return status

    def _tier_status(self, tier: LastingTier) -> FileTierStatus:
        level, counts = self._cache.level_of(tier), tier.counts
        written, read = counts.written, counts.read
        return FileTierStatus(
            pages=counts.num_pages,
            bytes=counts.nbytes,
            pages_written=written.num_pages,
            bytes_written=written.nbytes,
            pages_dropped=written.num_dropped,
            pages_failed=written.num_failed,
            pages_read=read.num_pages,
            bytes_read=read.nbytes,
            pages_corrupt=read.num_corrupt,
            loads_failed=read.num_failed,
            pauses=counts.num_opened,
            pages_not_loaded=self._cache.counts.not_loaded[level],
            saved_s=self._cache.counts.saved_s[level],
        )

    def links_status(self) -> WorkerStatus:
        """Return the part that is about links."""
        refusals = self._links.refusals
        return WorkerStatus(
            pages_sent=self._links.posting.num_pages_sent,
            links=self._links.linking.status(),
            link_failures=self._links.linking.num_failures,
            unauthenticated_messages=refusals.num_unauthenticated,
            refused_page_writes=refusals.num_ungranted,
            kv_port_open=refusals.is_open,
        )

    def _steps_status(self) -> WorkerStatus:
        graphs, meter, images = self._graph_use(), self._meter, self._images()
        step_model = meter.fit.model()
        return WorkerStatus(
            adapters_placed=self._adapters.turns.num_placed,
            waiting_for_adapter=self._adapters.turns.num_waiting,
            graphs=graphs.num_graphs,
            graph_bytes=graphs.nbytes,
            images_encoded=images.num_encoded,
            image_places_encoded=images.num_rows,
            images_reused=images.num_reused,
            images_pulled=images.num_pulled,
            prefill_s=meter.total_s,
            prefill_busy=meter.busy(time.monotonic()),
            prefill_tokens_per_s=meter.tokens_per_s,
            step_model=None if step_model is None else step_codec.model_to_wire(step_model),
        )
