"""Builds what a router with a store for batches needs for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Final

from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.router.admission.admission import Admission
from diptych.router.admission.in_flight import InFlight
from diptych.router.batches.batches import Batches
from diptych.router.batches.files import Files
from diptych.router.batches.idle import Busy
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.runner import BatchRunner
from diptych.router.batches.slots import Slots
from diptych.router.batches.store import StoreCalls, open_store
from diptych.router.batches.work import Bench, Serve
from diptych.router.config import RouterConfig
from diptych.router.metrics import RouterMetrics
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.known_worker import KnownWorker

MAX_LINE_BYTES: Final = 1 << 20  # of each line that waits in memory
TICK_S: Final = 1.0
LOOK_S: Final = 5.0
PREFILL: Final = (Role.PREFILL, Role.UNIFIED)
DECODE: Final = (Role.DECODE, Role.UNIFIED)


class Watcher:
    """Sees how busy the router and its workers are."""

    def __init__(self, fleet: Fleet, admission: Admission, in_flight: Sequence[InFlight], num_places: int) -> None:
        self._fleet = fleet
        self._admission = admission
        self._in_flight = in_flight
        self._num_places = num_places

    def busy(self, num_prompts: int) -> Busy:
        workers = [worker for worker in self._fleet.known_workers() if worker.state is State.READY]
        prefill = [worker for worker in workers if worker.role in PREFILL]
        decode = [worker for worker in workers if worker.role in DECODE] or prefill
        return Busy(
            self._admission.num_waiting,
            self._admission.num_running,
            self._num_places,
            sum(each.num_unanswered for each in self._in_flight),
            num_prompts,
            sum(worker.reported.num_queued for worker in prefill),
            len(prefill),
            max((_free_share(worker) for worker in decode), default=0.0),
            self._fleet.is_cold(),
        )


def _free_share(worker: KnownWorker) -> float:
    load = worker.reported
    total = load.free_tokens + load.context_tokens
    return load.free_tokens / total if total else 1.0


def new_batches(
    config: RouterConfig,
    fleet: Fleet,
    admission: Admission,
    in_flight: Sequence[InFlight],
    serve: Serve,
    metrics: RouterMetrics,
) -> Batches:
    """Open the store; `in_flight`: those of each model. Raises `ConfigError`."""
    store = StoreCalls(open_store(config.batch_store))
    files = Files(store)
    slots = Slots(config.batch_concurrency, Watcher(fleet, admission, in_flight, config.max_concurrent).busy)
    line_bytes = min(MAX_LINE_BYTES, config.max_body_bytes)
    bench = Bench(
        store, files, slots, serve, time.time, config.batch_lease_s, line_bytes, TICK_S, on_line=metrics.batch_line
    )
    runner = BatchRunner(bench, secrets.token_hex(8), LOOK_S)
    metrics.watch_batches(lambda: runner.num_working, lambda: slots.num_running)
    jobs = Jobs(store, time.time, runner.poke)
    return Batches(store, files, jobs, runner, time.time, config.batch_file_bytes, config.client_stall_s)
