"""Builds and runs one scheduler process: model, KV pool, core, links, loop. The composition root of every role.

Started by a frontend as `python -m diptych.<role>.scheduler JSON`. A spawned process, never a forked one: UCX and
CUDA do not survive a fork.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import zmq

from diptych.common import lifecycle
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.logging import setup
from diptych.engine.batch import OverlapRunner
from diptych.engine.cache_changes import NO_CHANGES, CacheChanges
from diptych.engine.events import SchedulerCore
from diptych.engine.grammar.compiler import Compiler
from diptych.engine.host_tier import NO_HOST_TIER, HostTier
from diptych.engine.kv_cache import KvCache
from diptych.engine.limits import Limits
from diptych.engine.loader.source import ModelSource, open_model
from diptych.engine.lora.registry import LoraRegistry
from diptych.engine.runner.host_pages import HostPages
from diptych.engine.runner.threads import configure_threads
from diptych.engine.runtime.admin_thread import AdminThread
from diptych.engine.runtime.grammar_thread import GrammarThread
from diptych.engine.runtime.link_tester import LinkTester
from diptych.engine.runtime.links import Links, NoLinks, PeerLinks
from diptych.engine.runtime.loop import SchedulerLoop
from diptych.engine.runtime.model_adapters import open_adapters
from diptych.engine.runtime.model_worker import TpModelWorkerClient
from diptych.engine.runtime.pool_size import head_share, num_host_slots, pool_layout
from diptych.engine.runtime.rank_process import serve_rank
from diptych.engine.runtime.scheduler_config import EngineOptions, SchedulerConfig
from diptych.engine.runtime.stepping import OverlappedStepping, Stepping, SynchronousStepping
from diptych.engine.runtime.weights import Host, Weights
from diptych.engine.tensor_parallel.shard import check_divides
from diptych.engine.transfer_rules import TransferRules, Window, layer_windows
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.layout_codec import layout_to_wire
from diptych.kvtransfer.notes import PROTOCOL_VERSION
from diptych.kvtransfer.transport import Pool, Transport
from diptych.v1 import bootstrap_pb2, engine_pb2

if TYPE_CHECKING:  # need torch, whose threads are configured first
    from diptych.engine.tensor_parallel.group import RankGroup

logger = logging.getLogger(__name__)

BuildCore = Callable[[KvCache, Limits, TransferRules, PoolLayout], SchedulerCore]


@dataclass(frozen=True, slots=True)
class Peering:
    """How the schedulers of a role reach their peers."""

    open_transport: Callable[[SchedulerConfig], Transport]
    link_tester: Callable[[Transport, Pool, SchedulerConfig], LinkTester]


@dataclass(frozen=True, slots=True)
class _Memory:
    """The KV pool and the way to peers, if there is one."""

    buffer: memoryview
    links: PeerLinks
    transfer: bootstrap_pb2.TransferInfo | None


def run_scheduler(argv: list[str], build_core: BuildCore, peering: Peering | None) -> int:
    """Run a scheduler process to its end; `peering` is None for an engine without peers."""
    config = SchedulerConfig.from_json(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; our frontend says when to stop
    lifecycle.die_with_parent(signal.SIGKILL, parent_pid=config.parent_pid)
    setup(config.name, config.log_format, config.log_level)
    configure_threads(config.engine.num_threads)  # before anything imports torch
    if config.rank:
        return _run_rank(config, peering)
    channel = _connect(config.endpoint)
    try:
        _serve(config, channel, build_core, peering)
    except DiptychError as error:
        logger.error("%s", error)
        return _report_fatal(channel, error)
    except Exception as error:
        logger.exception("the scheduler failed")
        return _report_fatal(channel, error)
    finally:
        channel.close(linger=1000)
    return 0


def _run_rank(config: SchedulerConfig, peering: Peering | None) -> int:
    """Run a rank other than 0. Whoever started it notices when it ends."""
    try:
        serve_rank(config, peering.open_transport(config) if peering else None)
    except DiptychError as error:
        logger.error("%s", error)
        return 1
    except Exception:
        logger.exception("the rank failed")
        return 1
    return 0


def _serve(
    config: SchedulerConfig,
    channel: zmq.Socket[bytes],
    build_core: BuildCore,
    peering: Peering | None,
) -> None:
    import torch

    from diptych.engine.runner.kv_pool import kv_view
    from diptych.engine.runner.model_part import ModelPart
    from diptych.engine.runner.model_runner import ModelRunner
    from diptych.engine.tensor_parallel.group import rank_group

    options = config.engine
    source = open_model(options.model, options.load_format)
    check_divides(source.config, options.tp)
    ranks = rank_group(config.endpoint, options.tp, torch.device("cpu"))
    part = ModelPart.of(source, ranks.communicator)
    layout = pool_layout(part.config, options, head_share(source.config, options, config.rank))
    windows = layer_windows(layout.num_layers, config.transfer.num_windows, layout.page_nbytes)
    memory = _allocate(layout, windows, ranks, peering, config)
    limits = _limits(source, options)
    grammars = GrammarThread(lambda: Compiler(source.tokenizer(), limits.vocab_size, limits.eos_ids))
    kv = kv_view(memory.buffer, layout)
    cache = _cache(options, limits, layout, memory.buffer, ranks)
    core = build_core(cache, limits, replace(config.transfer, num_windows=len(windows)), layout)
    registry = LoraRegistry(options.num_lora_slots, source.config.model_id)
    host = Host(
        open=lambda model: open_model(model, options.load_format),
        load=lambda source: ModelRunner(
            source,
            kv,
            dtype=options.dtype,
            quantization=options.quantization,
            attention_backend=options.attention_backend,
            num_threads=options.num_threads,
            max_loras=options.num_lora_slots,
            communicator=ranks.communicator,
            layer_listener=memory.links.layer_listener,
        ),
        compat=lambda source: _compat(source, config.kv_backend),
        is_idle=lambda: core.num_open_rooms == 0,
        clear_cache=cache.clear,
        obstacle=lambda: _obstacle(options, registry),
    )
    weights = Weights(options.model, source, host)
    adapters = open_adapters(source, options.loras(), registry, lambda: weights.runner.loras)
    admin = AdminThread({**adapters.handlers, **weights.handlers})
    max_tokens = min(limits.context_len, cache.max_request_tokens)
    compat = _compat(source, config.kv_backend)
    step_runner = ranks.lead_runner(weights)
    grammars.wait_until_open()
    ready = engine_pb2.SchedulerReady(transfer=memory.transfer, compat=compat, context_len=max_tokens)
    ready.loras.adapters.extend(adapters.news() or ())
    channel.send(engine_pb2.SchedulerEvents(ready=ready).SerializeToString())
    logger.info("ready: %s, %d KV pages of %d tokens", source.config.model_id, layout.num_pages, layout.page_size)
    stepping = _stepping(options, core, step_runner)
    try:
        SchedulerLoop(
            core, stepping, channel, memory.links, grammars, admin, adapters, cache=cache, max_tokens=max_tokens
        ).run()
    finally:
        stepping.close()
        admin.close()
        grammars.close()
        memory.links.close()
        ranks.close()


def _cache(options: EngineOptions, limits: Limits, layout: PoolLayout, pool: memoryview, ranks: RankGroup) -> KvCache:
    return KvCache(
        num_pages=layout.num_pages,
        page_size=layout.page_size,
        max_requests=limits.max_requests,
        max_tokens_per_request=limits.context_len,
        eviction_policy=options.eviction_policy,
        host_tier=_host_tier(num_host_slots(layout, options), pool, layout, ranks),
        changes=CacheChanges() if options.kv_events == "on" else NO_CHANGES,
    )


def _stepping(options: EngineOptions, core: SchedulerCore, runner: OverlapRunner) -> Stepping:
    """Overlap pays where steps run beside the host's cores, so `auto` leaves it off on CPUs."""
    if options.overlap != "on":
        return SynchronousStepping(core, runner, time.monotonic)
    if not core.can_overlap:
        raise ConfigError("--overlap on is not for prefill workers: their pages are sent between steps")
    return OverlappedStepping(core, TpModelWorkerClient(runner), time.monotonic)


def _allocate(
    layout: PoolLayout, windows: Sequence[Window], ranks: RankGroup, peering: Peering | None, config: SchedulerConfig
) -> _Memory:
    if peering is None:
        return _Memory(memoryview(bytearray(layout.nbytes)), NoLinks(), None)
    transport = ranks.lead_transport(peering.open_transport(config))
    pool = transport.allocate_pool(layout)
    info = bootstrap_pb2.TransferInfo(engine_metadata=transport.metadata(), layout=layout_to_wire(layout))
    links = Links(transport, peering.link_tester(transport, pool, config), windows)
    return _Memory(pool.buffer, links, info)


def _host_tier(num_slots: int, pool: memoryview, layout: PoolLayout, ranks: RankGroup) -> HostTier:
    if not num_slots:
        return NO_HOST_TIER
    return HostTier(num_slots, ranks.lead_copier(HostPages(pool, layout.page_nbytes, num_slots)))


def _obstacle(options: EngineOptions, registry: LoraRegistry) -> str | None:
    """Say why other weights can't be served now."""
    if options.tp > 1:
        return "the weights of a tensor-parallel worker can't be replaced: restart it"
    if registry.loaded():
        return "adapters are loaded, which were made for the weights that are served: unload them first"
    return None


def _limits(source: ModelSource, options: EngineOptions) -> Limits:
    return Limits(
        context_len=source.config.context_len,
        vocab_size=source.config.vocab_size,
        eos_ids=frozenset(token_id for token_id in source.config.eos_ids if token_id < source.config.vocab_size),
        max_step_tokens=options.max_step_tokens,
        max_requests=options.max_requests,
        scheduling=options.scheduling(),
    )


def _compat(source: ModelSource, kv_backend: str) -> str:
    """Hash of what two workers must share to exchange KV. Page size, ranks and type of the KV may differ."""
    model = source.config
    shape = (model.num_layers, model.num_kv_heads, model.head_dim)
    text = repr((source.weights_id, model.vocab_size, shape, PROTOCOL_VERSION, kv_backend))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _connect(endpoint: str) -> zmq.Socket[bytes]:
    channel: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    channel.set_hwm(0)  # the loop must not block; what is in flight is bounded by the open requests
    channel.connect(endpoint)
    return channel


def _report_fatal(channel: zmq.Socket[bytes], error: Exception) -> int:
    fatal = f"{type(error).__name__}: {error}"
    channel.send(engine_pb2.SchedulerEvents(fatal=fatal).SerializeToString())
    return 1


def main() -> int:
    """The scheduler of an embedded engine."""
    from diptych.engine.aggregated import AggregatedCore

    return run_scheduler(sys.argv, lambda cache, limits, rules, layout: AggregatedCore(cache, limits), None)


if __name__ == "__main__":
    sys.exit(main())
