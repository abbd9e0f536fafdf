"""Builds and runs a tensor-parallel rank other than 0: its part of the model and of the KV pool, and no scheduler."""

from __future__ import annotations

from diptych.engine.loader.source import open_model
from diptych.engine.runner.host_pages import HostPages
from diptych.engine.runtime.pool_size import head_share, num_host_slots, pool_layout
from diptych.engine.runtime.scheduler_config import SchedulerConfig
from diptych.engine.tensor_parallel.fan_out import FanOut
from diptych.engine.tensor_parallel.rank_log import store_path
from diptych.engine.tensor_parallel.rank_transfer import RankTransfer
from diptych.engine.tensor_parallel.shard import check_divides
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import Transport
from diptych.v1 import rank_pb2


def serve_rank(config: SchedulerConfig, transport: Transport | None) -> None:
    """Apply what rank 0 decides until it says that it is over."""
    import torch

    from diptych.engine.runner.kv_pool import kv_view
    from diptych.engine.runner.model_part import ModelPart
    from diptych.engine.runner.model_runner import ModelRunner
    from diptych.engine.tensor_parallel.communicator import TorchCommunicator
    from diptych.engine.tensor_parallel.tp_model_worker import TpModelWorker

    options = config.engine
    worker = TpModelWorker(config.endpoint, config.rank)
    source = open_model(options.model, options.load_format)
    check_divides(source.config, options.tp)
    communicator = TorchCommunicator(config.rank, options.tp, store_path(config.endpoint), torch.device("cpu"))
    part = ModelPart.of(source, communicator)
    layout = pool_layout(part.config, options, head_share(source.config, options, config.rank))
    buffer, transfer = _allocate(layout, transport)
    if transport is not None:
        worker.answer(rank_pb2.RankAnswer(engine_metadata=transport.metadata()))
    runner = ModelRunner(
        source,
        kv_view(buffer, layout),
        dtype=options.dtype,
        quantization=options.quantization,
        attention_backend=options.attention_backend,
        num_threads=options.num_threads,
        communicator=communicator,
    )
    worker.answer(rank_pb2.RankAnswer(is_loaded=True))
    host_pages = HostPages(buffer, layout.page_nbytes, num_host_slots(layout, options))
    worker.run(runner, transfer, host_pages)
    worker.close()
    communicator.close()


def _allocate(layout: PoolLayout, transport: Transport | None) -> tuple[memoryview, RankTransfer | None]:
    if transport is None:
        return memoryview(bytearray(layout.nbytes)), None
    links = FanOut(transport)
    pool = links.allocate_pool(layout)
    return pool.buffer, RankTransfer(links, pool)
