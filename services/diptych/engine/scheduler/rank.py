"""A tensor-parallel rank other than 0: it has its part of the model and of the KV pool, and no scheduler."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from diptych.architectures.fair_shares import check_divides
from diptych.architectures.stages import check_stages
from diptych.checkpoints.source import ModelSource
from diptych.common import lifecycle
from diptych.common.garbage import garbage_postponed, spare_what_stays
from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.scheduler.base import Hardware, open_host_pages
from diptych.engine.scheduler.weights import loader_of
from diptych.engine.tensor_parallel.company import joining, reaching
from diptych.engine.tensor_parallel.rank_model import RankModel
from diptych.engine.tensor_parallel.rank_tasks import RankTasks
from diptych.engine.tensor_parallel.tp_model_worker import RankMedium, RankTransfer, TpModelWorker
from diptych.engine.tensor_parallel.weight_sets import RankWeights
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import Transport
from diptych.v1 import rank_pb2

logger = logging.getLogger(__name__)


def serve_rank(config: SchedulerConfig, transport: Transport | None) -> None:
    """Apply what rank 0 decides until it says that it is over."""
    with garbage_postponed():
        from diptych.engine.runner.torch_hardware import TorchHardware  # torch, whose threads are configured first

    hardware = TorchHardware(config.engine, config.gpu)
    channels = reaching(config.endpoint, config.place, _leave)
    worker = TpModelWorker(channels, config.rank)
    source = hardware.open(hardware.options.model)
    check_divides(source.config, hardware.options.tp)
    check_stages(source.config, hardware.options.pp)
    communicator = hardware.join(joining(config.endpoint, config.place, worker), config.rank)
    if config.sharing is not None:
        hardware.share_experts(config.sharing, config.rank)
    layout = hardware.pool_layout(source, config.rank)
    pool = hardware.allocate(layout, transport)
    copier = open_host_pages(hardware, layout, config.rank, source.config)
    if transport is not None:
        worker.answer(rank_pb2.RankAnswer(engine_metadata=transport.metadata()))
    lasting = _lasting_tiers(source, layout, hardware, copier, worker, config.rank)
    loader = loader_of(hardware, config.rank, lambda source: hardware.load(source, lambda: None))
    weights = RankWeights(hardware.options.model, source, loader)
    tasks = RankTasks(channels, config.rank)
    adapters = hardware.adapters(source, config.rank, lambda: weights.served.runner.loras)
    worker.report_loaded_model()
    spare_what_stays()
    model = RankModel(weights, adapters, tasks, hardware.begin_round)
    worker.run(model, RankTransfer(transport, pool) if transport and pool else None, copier, lasting)
    tasks.close()
    for medium in lasting:
        medium.close()
    copier.close()
    worker.close()
    communicator.close()


def _leave(words: str) -> None:
    """End a rank that has lost rank 0, whatever it waits for: a collective, an entry. Its node tells the group."""
    logger.error("%s", words)
    lifecycle.exit_now(1)


def _lasting_tiers(
    source: ModelSource, layout: PoolLayout, hardware: Hardware, copier: PageCopier, worker: TpModelWorker, rank: int
) -> Sequence[RankMedium]:
    """Return this rank's parts of those that the options name. Raises `ConfigError`."""
    if not (hardware.options.file_cache_dir or hardware.options.shared_cache):
        return ()
    from diptych.engine.scheduler.lasting_opened import open_rank_tiers

    return open_rank_tiers(source, layout, hardware, copier, worker, rank)
