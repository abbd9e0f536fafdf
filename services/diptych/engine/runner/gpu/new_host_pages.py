"""Builds the host tier's copies of a GPU: host memory, the buffer, streams. The composition root of what is here."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.runner.gpu.copy_queues import stream_queues
from diptych.engine.runner.gpu.gpu_host_pages import NUM_PARTS, GpuHostPages
from diptych.engine.runner.gpu.page_movement import PageMovement
from diptych.engine.runner.gpu.piece_copies import copies_of_this_driver
from diptych.engine.runner.gpu.pinned_memory import pinned_for_gpus
from diptych.kernels.gpu.pages.page_mover import WORD_NBYTES


def new_host_pages(kv: Tensor, num_slots: int, num_buffered: int, rank: int) -> GpuHostPages:
    """Return what copies pages of `kv`, a GPU's pool, to `num_slots` slots of host memory, and back.

    Raises `ConfigError` where there is no memory for the slots, or for about `num_buffered` pages on the GPU.
    """
    pool = kv.view(torch.uint8).view(len(kv), -1)
    page_nbytes = pool.shape[1]
    if page_nbytes % WORD_NBYTES:
        raise ConfigError(f"--host-cache-mib needs pages of whole {WORD_NBYTES} bytes, these have {page_nbytes}")
    num_buffered = max(NUM_PARTS, num_buffered)
    try:
        buffer = torch.empty(num_buffered, page_nbytes, dtype=torch.uint8, device=kv.device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "no GPU memory is left for pages on their way to host memory: lower --kv-cache-mib"
        ) from error
    host = pinned_for_gpus(num_slots * page_nbytes).tensor.view(num_slots, page_nbytes)
    movement = PageMovement(pool, buffer, host, copies_of_this_driver())
    movement.warm_up()
    return GpuHostPages(movement, stream_queues(kv.device, rank=rank), num_slots, num_buffered)
