"""Builds what a router with a store for batches needs for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from diptych.common.errors import DiptychError
from diptych.common.members.record import State
from diptych.common.members.roles import Role
from diptych.router.admission.admission import Admission
from diptych.router.admission.in_flight import InFlight
from diptych.router.batches.batches import Batches
from diptych.router.batches.bench import Bench, Serve
from diptych.router.batches.files import Files
from diptych.router.batches.idle import Busy
from diptych.router.batches.jobs import Jobs
from diptych.router.batches.runner import BatchRunner
from diptych.router.batches.slots import Slots
from diptych.router.batches.store import StoreCalls, open_store
from diptych.router.config import RouterConfig
from diptych.router.metrics import RouterMetrics
from diptych.router.serve.models import Models
from diptych.router.workers.fleet import Fleet
from diptych.router.workers.known_worker import KnownWorker

MAX_LINE_BYTES: Final = 1 << 20  # of each line that waits in memory
TICK_S: Final = 1.0
LOOK_S: Final = 5.0
PREFILL: Final = (Role.PREFILL, Role.UNIFIED)
DECODE: Final = (Role.DECODE, Role.UNIFIED)
NO_MODEL: Final = -1


class Watched(NamedTuple):
    """What serves one model."""

    fleet: Fleet
    in_flight: InFlight


class Watcher:
    """Sees how busy the router is, and the workers of each model: what one's do is nothing to the lines of another."""

    def __init__(self, models: Sequence[Watched], admission: Admission, num_places: int) -> None:
        self._models = models
        self._admission = admission
        self._num_places = num_places

    def busy(self, number: int, num_prompts: int) -> Busy:
        """Return it for lines of the model of this number, of which `num_prompts` have no first token."""
        if number == NO_MODEL:
            return self._busy(num_prompts)
        fleet, in_flight = self._models[number]
        workers = [worker for worker in fleet.own_workers() if worker.state is State.READY]
        prefill = [worker for worker in workers if worker.role in PREFILL]
        decode = [worker for worker in workers if worker.role in DECODE] or prefill
        return self._busy(num_prompts)._replace(
            num_unanswered=in_flight.num_unanswered,
            num_queued=sum(worker.reported.num_queued for worker in prefill),
            num_prefill=len(prefill),
            free_share=max((_free_share(worker) for worker in decode), default=0.0),
            is_cold=fleet.is_cold(),
        )

    def _busy(self, num_prompts: int) -> Busy:
        """Return it for lines that no worker is going to see."""
        running, waiting = self._admission.num_running, self._admission.num_waiting
        return Busy(waiting, running, self._num_places, 0, num_prompts, 0, 1, 1.0, False)


def number_of(models: Models, name: str) -> int:
    """Return which of the models a line means; `NO_MODEL`: none, so it will be refused."""
    try:
        return list(models).index(models.named(name))
    except DiptychError:
        return NO_MODEL


def _free_share(worker: KnownWorker) -> float:
    load = worker.reported
    total = load.free_tokens + load.context_tokens
    return load.free_tokens / total if total else 1.0


def new_batches(
    config: RouterConfig,
    models: Models,
    watched: Sequence[Watched],
    admission: Admission,
    serve: Serve,
    metrics: RouterMetrics,
) -> Batches:
    """Open the store; `watched`: what serves each of the models. Raises `ConfigError`."""
    store = StoreCalls(open_store(config.batch_store))
    files = Files(store)
    watcher = Watcher(watched, admission, config.max_concurrent)
    slots = Slots(config.batch_concurrency, watcher.busy, partial(number_of, models))
    line_bytes = min(MAX_LINE_BYTES, config.max_body_bytes)
    bench = Bench(
        store, files, slots, serve, time.time, config.batch_lease_s, line_bytes, TICK_S, on_line=metrics.batch_line
    )
    runner = BatchRunner(bench, secrets.token_hex(8), LOOK_S)
    metrics.watch_batches(lambda: runner.num_working, lambda: slots.num_running)
    jobs = Jobs(store, time.time, runner.poke)
    return Batches(store, files, jobs, runner, time.time, config.batch_file_bytes, config.client_stall_s)
