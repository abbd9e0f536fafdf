"""Builds and runs one scheduler process: the base, a core, the loop. The composition root of every role.

Started by a frontend as `python -m MODULE JSON`. A spawned process, never a forked one: UCX and CUDA do not survive a
fork.

A tensor-parallel rank other than 0 has its part of the model and of the KV pool, and no scheduler: see `rank`.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import zmq

from diptych.common import lifecycle
from diptych.common.arrays import I64
from diptych.common.errors import DiptychError
from diptych.common.garbage import spare_what_stays
from diptych.common.logging import setup
from diptych.common.members.heartbeat import SharedHeartbeat
from diptych.common.members.terms import Terms, terms_to_wire
from diptych.common.net.reachable import transfer_where
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.lora.registry import LoraRegistry
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.options.pool_size import pool_words
from diptych.engine.options.speculation import parse_speculate
from diptych.engine.runner.threads import configure_threads
from diptych.engine.schedule.adapter_turns import AdapterTurns, Turns
from diptych.engine.schedule.pace.step_sizes import words
from diptych.engine.scheduler.adapters import Adapters, open_adapters
from diptych.engine.scheduler.admin_thread import AdminThread, Effect
from diptych.engine.scheduler.base import (
    ModelOnHardware,
    OpenTransport,
    SchedulerBase,
    build_base,
)
from diptych.engine.scheduler.crash_dump import CrashDump
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.scheduler.lockstep import LockstepRunner, LockstepStepping
from diptych.engine.scheduler.loop import Parts, SchedulerLoop
from diptych.engine.scheduler.news import News
from diptych.engine.scheduler.profiling import Profiler, TorchTrace
from diptych.engine.scheduler.stepping import (
    OverlappedStepping,
    QueuedSteps,
    Stepping,
    SynchronousStepping,
    TpModelWorkerClient,
)
from diptych.engine.scheduler.terms import worker_terms
from diptych.engine.scheduler.weights import Host, Weights, loader_of
from diptych.engine.tensor_parallel.company import HostLead, Lead, NodesLead
from diptych.engine.tensor_parallel.last_words import last_words
from diptych.engine.tensor_parallel.sharing.step_clock import StepClock
from diptych.engine.tensor_parallel.weight_sets import RankWeights
from diptych.engine.values.batch import DraftBatch, DraftModel, GraphUse, OverlapRunner
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.rounds import NOTHING, Round
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.request_groups import OF_HEAD, OF_NEXT_LAYER
from diptych.kvtransfer.layout import PoolLayout
from diptych.v1 import bootstrap_pb2, engine_pb2, rank_pb2, worker_pb2
from diptych.v1.admin_pb2 import AdminAnswer, FlushCacheResponse

if TYPE_CHECKING:
    from diptych.checkpoints.source import ModelSource
    from diptych.engine.weights.door import WeightsDoor
    from diptych.engine.weights.taking import Taking
    from diptych.grammars.compiler import Compiler

logger = logging.getLogger(__name__)

GIVERS_MS: Final = 8000  # until the frontend has named those who give weights
LAST_WORDS_MS: Final = 1000  # that what was sent to the frontend may take to leave

BuildCore = Callable[
    [KvCache, Limits, SchedulerConfig, PoolLayout, Turns, DraftModel, Callable[[], GraphUse]], SchedulerCore
]


def run_scheduler(argv: list[str], build_core: BuildCore, open_transport: OpenTransport) -> NoReturn:
    """Be a scheduler process."""
    config = SchedulerConfig.from_json(argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group; our frontend says when to stop
    lifecycle.die_with_parent(signal.SIGKILL, parent_pid=config.parent_pid)
    lifecycle.tell_stacks()
    setup(config.name, config.log_format, config.log_level)
    transfer_where(config.host)
    code = _run(config, build_core, open_transport)
    zmq.Context.instance().destroy(linger=LAST_WORDS_MS)
    lifecycle.exit_now(code)


def _run(config: SchedulerConfig, build_core: BuildCore, open_transport: OpenTransport) -> int:
    """Return the exit code. Rank 0 tells the frontend why it ends; whoever started another rank notices that it has."""
    channel = None if config.rank else _connect(config.endpoint)
    try:
        _prepare_torch(config.engine)
        if channel is None:
            from diptych.engine.scheduler.rank import serve_rank

            serve_rank(config, open_transport(config))
        else:
            lead = _lead(config, channel)
            taking = _taking(config, channel)
            base = build_base(config, open_transport, lead, taking)
            _serve(base, channel, build_core, taking)
    except Exception as error:
        if isinstance(error, DiptychError):
            logger.error("%s", error)
        else:
            logger.exception("the %s failed", "rank" if config.rank else "scheduler")
        if channel is not None:
            _tell_fatal(channel, error)
        return 1
    return 0


def _tell_fatal(channel: zmq.Socket[bytes], error: Exception) -> None:
    """Tell the frontend, which ends what is left of the group; it hears the first that it is told."""
    channel.send(engine_pb2.SchedulerEvents(fatal=last_words(error)).SerializeToString())


def _taking(config: SchedulerConfig, channel: zmq.Socket[bytes]) -> Taking | None:
    """Return from whom weights may come, as the frontend says first of all; nobody, if it does not in time."""
    if config.weights_from != "peers":
        return None
    from diptych.engine.weights.taking import Taking  # torch, whose threads are configured first
    from diptych.engine.weights.wire import Giver

    commands = engine_pb2.SchedulerCommands()
    if channel.poll(GIVERS_MS):
        commands.ParseFromString(channel.recv())
    givers = commands.weight_givers.givers
    return Taking([Giver(each.host, each.door.port, each.door.key) for each in givers])


def _lead(config: SchedulerConfig, channel: zmq.Socket[bytes]) -> Lead:
    """Return the way to the other ranks. Nodes hear by the frontend where we listen."""
    if config.place is None:
        return HostLead(config.endpoint)

    def tell(doors: rank_pb2.RankDoors) -> None:
        channel.send(engine_pb2.SchedulerEvents(rank_doors=doors).SerializeToString())

    return NodesLead(config.endpoint, config.place, config.engine.num_ranks, tell)


def _prepare_torch(options: EngineOptions) -> None:
    """Before anything imports it."""
    if options.device != "sim":
        configure_threads(options.num_threads)


@dataclass(frozen=True, slots=True)
class Deciding:
    """What decides in a scheduler, and the adapters and weights that it decides about."""

    cache: KvCache
    core: SchedulerCore
    adapters: Adapters[Any]
    weights: Weights[ModelOnHardware]


def _serve(base: SchedulerBase, channel: zmq.Socket[bytes], build_core: BuildCore, taking: Taking | None) -> None:
    config, limits = base.config, base.limits()
    grammars = GrammarThread(lambda: _compiler(base.source, limits))
    parts = _deciding(base, limits, build_core)
    cache, core, weights = parts.cache, parts.core, parts.weights
    profiler = Profiler(None if config.engine.device == "sim" else TorchTrace, config.name)
    admin = _admin(parts, profiler)
    clock = None if config.sharing is None else StepClock(config.sharing)
    stepping = profiler.over(_stepping_of(base, core, weights, clock))
    grammars.wait_until_open()
    door = _open_door(config, weights)
    if clock is not None:
        clock.meet(NOTHING)  # who is ready may step at once: no other one is still loading
    _report_ready(base, channel, core, parts.adapters, door)
    calls = () if clock is None else (clock.descriptor(),)
    loop_parts = Parts(base.links, grammars, admin, parts.adapters, base.watch, base.copier, base.lasting, calls)
    cache.compute_s = stepping.meter.compute_s
    news = _news(base, parts, stepping, Copies(taking, door))
    loop = SchedulerLoop(core, stepping, channel, loop_parts, news, SharedHeartbeat(config.heartbeat_fd).beat)
    dump = CrashDump(core, cache, stepping.meter, config.name)
    dump.on_signal()
    spare_what_stays()
    try:
        loop.run()
    except Exception as error:
        dump.write(error)
        _tell_fatal(channel, error)  # before parts are closed, which wait for other ranks
        raise
    finally:
        for part in (*([door] if door else ()), stepping, admin, grammars, base):
            part.close()


def _deciding(base: SchedulerBase, limits: Limits, build_core: BuildCore) -> Deciding:
    """Build the core, and what it decides about; the model of drafts is that of the weights which are served then."""
    source, options = base.source, base.config.engine
    cache = base.new_cache(limits)
    cache.made_by = _making(base, source)
    turns = AdapterTurns(options.num_lora_slots)
    draft_model = base.ranks.lead_draft_model(ServedDraftModel(lambda: weights.runner.draft_model))
    core = build_core(cache, limits, base.config, base.layout, turns, draft_model, lambda: weights.runner.graph_use)
    registry = LoraRegistry(options.num_loaded_loras, source.config.model_id)
    loader = loader_of(base.hardware, base.config.rank, base.load)
    sets = base.ranks.lead_weights(RankWeights(options.model, source, loader))
    own_adapters = base.hardware.adapters(source, base.config.rank, lambda: sets.served.runner.loras)
    adapters = open_adapters(base.ranks.lead_adapters(own_adapters), options.loras(), registry, turns)
    weights = Weights(sets, host_of(base, core, cache, turns))
    return Deciding(cache, core, adapters, weights)


def _admin(parts: Deciding, profiler: Profiler) -> AdminThread:
    """Return the thread of what operators ask for."""
    flush = {"flush_cache": lambda command: flush_of(parts.cache)}
    handlers = {**parts.adapters.handlers, **parts.weights.handlers, **profiler.handlers, **flush}
    return AdminThread(handlers, profiler.waiting)


def _stepping_of(
    base: SchedulerBase, core: SchedulerCore, weights: Weights[ModelOnHardware], clock: StepClock | None
) -> Stepping:
    """Step by ourselves, or with those that share experts with us."""
    runner = base.ranks.lead_runner(weights)
    if clock is None:
        return _stepping(base.config.engine, core, runner)
    return _in_lockstep(base, core, runner, clock, lambda: weights.runner.serve_others())


def _news(base: SchedulerBase, parts: Deciding, stepping: Stepping, copies: Copies) -> News:
    weights, meter = parts.weights, stepping.meter
    return News(
        parts.core,
        parts.cache,
        base.links,
        parts.adapters,
        meter,
        lambda: weights.runner.graph_use,
        base.lasting,
        copies,
        lambda: weights.runner.image_counts,
    )


def _compiler(source: ModelSource, limits: Limits) -> Compiler:
    """Return what compiles grammars. Its library is imported in the thread that opens it, beside the weights."""
    from diptych.grammars.compiler import Compiler

    return Compiler(source.tokenizer(), limits.vocab_size, limits.eos_ids)


def _open_door(config: SchedulerConfig, weights: Weights[ModelOnHardware]) -> WeightsDoor | None:
    """Give the weights that are served at any time, where it is wanted."""
    if config.weights_from != "peers":
        return None
    from diptych.engine.weights.door import WeightsDoor

    return WeightsDoor(config.host, lambda: weights.runner.memory())


@dataclass(frozen=True, slots=True)
class Copies:
    """Implements `WeightCopies` by who takes and who gives; None: it does not."""

    taking: Taking | None
    door: WeightsDoor | None

    @property
    def taken_nbytes(self) -> int:
        return self.taking.nbytes if self.taking else 0

    @property
    def num_failed(self) -> int:
        return self.taking.num_failed if self.taking else 0

    @property
    def num_given(self) -> int:
        return self.door.num_given if self.door else 0


class ServedDraftModel:
    """Implements `DraftModel` by that of the weights that are served now."""

    def __init__(self, current: Callable[[], DraftModel | None]) -> None:
        self._current = current

    def draft(self, batch: DraftBatch) -> I64:
        model = self._current()
        assert model is not None, "asked for guesses only where --speculate names a model"
        return model.draft(batch)

    def row(self, slot: int) -> bytes:
        model = self._current()
        return b"" if model is None else model.row(slot)

    def put_row(self, slot: int, row: bytes) -> None:
        model = self._current()
        if model is not None:
            model.put_row(slot, row)


def host_of(base: SchedulerBase, core: SchedulerCore, cache: KvCache, turns: AdapterTurns) -> Host:
    """Return what of the scheduler bears on a change of its weights."""
    return Host(
        lead=base.ranks.leading,
        terms=lambda source: _terms(base, source),
        is_idle=lambda: core.report().num_open_rooms == 0 and not cache.is_held,
        clear_cache=lambda source: _forget(base, cache, source),
        place_adapters=turns.place_again,
        obstacle=lambda: _obstacle(base.config),
    )


def flush_of(cache: KvCache) -> Effect:
    """Return what empties the prefix cache between two steps; requests that run keep what they hold."""
    return lambda: AdminAnswer(flush_cache=FlushCacheResponse(pages=cache.flush()))


def _forget(base: SchedulerBase, cache: KvCache, source: ModelSource) -> None:
    """Others weights make its KV from now on."""
    cache.clear()
    cache.made_by = _making(base, source)


def _making(base: SchedulerBase, source: ModelSource) -> str:
    """Name what KV is made by, and its form: what caches that share pages must have in common."""
    dtypes = "+".join(region.dtype for region in base.layout.regions)
    return f"{_terms(base, source).compat}, {dtypes}, {base.layout.page_size} tokens"


def _terms(base: SchedulerBase, source: ModelSource) -> Terms:
    config, engine = base.config, base.config.engine
    name = base.hardware.device_name
    return worker_terms(source, config.kv_backend, base.layout, config.transfer, engine, name)


def _report_ready(
    base: SchedulerBase,
    channel: zmq.Socket[bytes],
    core: SchedulerCore,
    adapters: Adapters[Any],
    door: WeightsDoor | None,
) -> None:
    config, layout = base.config, base.layout
    terms = terms_to_wire(_terms(base, base.source))
    sizes = base.chosen.sizes
    ready = engine_pb2.SchedulerReady(
        transfer=base.transfer,
        terms=terms,
        context_len=core.max_tokens,
        max_requests=sizes.max_requests,
        max_step_tokens=sizes.max_step_tokens,
        computing=_computing(base),
        makes_vectors=base.source.config.pooling is not None,
    )
    ready.loras.adapters.extend(adapters.news() or ())
    if door is not None:
        ready.transfer.weights_door.CopyFrom(bootstrap_pb2.WeightsDoor(port=door.port, key=door.key))
    channel.send(engine_pb2.SchedulerEvents(ready=ready).SerializeToString())
    model = base.source.config
    logger.info("%s", words(base.chosen))
    logger.info(
        "ready: %s, %s", model.model_id, pool_words(model, layout, config.engine, sizes.max_requests + PROMPT_ROWS)
    )


def _computing(base: SchedulerBase) -> worker_pb2.Computing:
    dtypes = sorted({region.dtype for region in base.layout.regions})
    engine = base.config.engine
    return worker_pb2.Computing(
        device=base.hardware.device_name, kv_dtype=" and ".join(dtypes), tp=engine.tp, pp=engine.pp
    )


def _stepping(options: EngineOptions, core: SchedulerCore, runner: OverlapRunner) -> Stepping:
    """Overlap pays where steps run beside the host's cores, so `auto` leaves it off on CPUs."""
    on_gpu = options.device == "cuda"
    if options.overlap == "off" or (options.overlap == "auto" and not on_gpu):
        return SynchronousStepping(core, runner, time.monotonic)
    worker = QueuedSteps(runner) if on_gpu else TpModelWorkerClient(runner)
    return OverlappedStepping(core, worker, time.monotonic)


def _in_lockstep(
    base: SchedulerBase, core: SchedulerCore, runner: OverlapRunner, clock: StepClock, serve_others: Callable[[], None]
) -> Stepping:
    """Step when all schedulers do that share experts."""

    def begin(common: Round, is_without_us: bool) -> None:
        base.ranks.lead_round(common, is_without_us=is_without_us)
        base.hardware.begin_round(common)

    lockstep = LockstepRunner(runner, clock, begin, serve_others, base.config.engine.overlap_batches)
    return LockstepStepping(_stepping(base.config.engine, core, lockstep), lockstep, clock)


def _obstacle(config: SchedulerConfig) -> str | None:
    """Say why other weights can't be served now."""
    options = config.engine
    if config.weights_from == "peers":  # who take them from here by the name of what was loaded
        return "a worker that gives its weights to others keeps them: restart it without --weights-from peers"
    if options.pp > 1:
        return "stages of a pipeline (--pp) keep their weights: restart the worker"
    if options.dp_attention:
        return "schedulers that share experts (--dp-attention) keep their weights: restart the worker"
    if options.file_cache_dir or options.shared_cache:
        which = "--file-cache-dir" if options.file_cache_dir else "--shared-cache"
        return f"a worker that keeps KV for longer than it lives keeps its weights: restart it, or leave out {which}"
    source = parse_speculate(options.speculate).source
    if source in (OF_NEXT_LAYER, OF_HEAD):  # which have matrices of the model's
        return (
            f"a worker that guesses by the model's own rows keeps its weights: restart it without --speculate {source}"
        )
    return None


def _connect(endpoint: str) -> zmq.Socket[bytes]:
    channel: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    channel.set_hwm(0)  # the loop must not block; what is in flight is bounded by the open requests
    channel.connect(endpoint)
    return channel
