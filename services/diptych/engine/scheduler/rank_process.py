"""Builds and runs a tensor-parallel rank other than 0: its part of the model and of the KV pool, and no scheduler."""

from __future__ import annotations

from diptych.common.garbage import postponed, spare_what_stays
from diptych.engine.cache.host_tier import NO_COPIER
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.options.pool_size import num_host_slots
from diptych.engine.runner.host_pages import HostPages
from diptych.engine.tensor_parallel.rank_transfer import RankTransfer
from diptych.engine.tensor_parallel.shard import check_divides
from diptych.kvtransfer.transport import Transport
from diptych.v1 import rank_pb2


def serve_rank(config: SchedulerConfig, transport: Transport | None) -> None:
    """Apply what rank 0 decides until it says that it is over."""
    with postponed():
        from diptych.engine.runner.torch_hardware import TorchHardware  # torch, whose threads are configured first
    from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker

    hardware = TorchHardware(config.engine, config.gpu)
    worker = TpModelWorker(config.endpoint, config.rank)
    source = hardware.open(hardware.options.model)
    check_divides(source.config, hardware.options.tp)
    communicator = hardware.join(config.endpoint, config.rank)
    layout = hardware.pool_layout(source, config.rank)
    pool = hardware.allocate(layout, transport)
    if transport is not None:
        worker.answer(rank_pb2.RankAnswer(engine_metadata=transport.metadata()))
    runner = hardware.load(source, lambda: None)
    worker.answer(rank_pb2.RankAnswer(is_loaded=True))
    num_slots = num_host_slots(layout, hardware.options)
    copier = HostPages(hardware.pool_bytes(), layout.page_nbytes, num_slots) if num_slots else NO_COPIER
    spare_what_stays()
    worker.run(runner, RankTransfer(transport, pool) if transport and pool else None, copier)
    worker.close()
    communicator.close()
