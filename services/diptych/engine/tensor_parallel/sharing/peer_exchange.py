"""Memory of the ranks that share experts, through which tokens go to experts and back."""

from __future__ import annotations

import logging
from typing import Final

import torch

from diptych.engine.models.expert_ranks import PeerExchange
from diptych.engine.tensor_parallel.peer_sums import LARGEST_GROUP, Group, open_memory
from diptych.kernels.gpu.collectives.expert_exchange import VECTOR_NBYTES, ExchangeShape, ExpertExchange
from diptych.kernels.gpu.collectives.meeting import MAX_POLLS
from diptych.kernels.gpu.layers.norms import LARGEST_ROW

logger = logging.getLogger(__name__)

MOST_PLACES: Final = 8192  # for tokens of all ranks, on each: what comes of larger steps is counted first


def open_exchange(
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    experts_per_token: int,
    room: int,
    max_polls: int = MAX_POLLS,
) -> PeerExchange | None:
    """Return this rank's; None on all ranks where one can't. All call it at once. `room`: places for its experts."""
    if reason := _unfit(group.size, dtype.itemsize, width):
        if group.rank == 0:  # all ranks say the same
            logger.info("tokens go to experts by NCCL, launch by launch: %s", reason)
        return None
    shape = ExchangeShape(group.size, room, experts_per_token, width, dtype.itemsize, MOST_PLACES // group.size)
    opened = open_memory(group, device, shape.memory_nbytes)
    if opened is None:
        logger.warning("tokens go to experts by NCCL, launch by launch: GPUs can't open each other's memory")
        return None
    memory, addresses = opened
    return ExpertExchange(group.rank, shape, memory.tensor(), addresses, max_polls=max_polls)


def _unfit(num_ranks: int, itemsize: int, width: int) -> str:
    """Return why the kernels can't exchange hidden states of so many numbers; empty: they can."""
    if num_ranks > LARGEST_GROUP:
        return f"{num_ranks} GPUs share them, and {LARGEST_GROUP} at most exchange by stores"
    if width * itemsize % VECTOR_NBYTES:
        return f"a hidden state has {width * itemsize} bytes, which is no multiple of {VECTOR_NBYTES}"
    if width > LARGEST_ROW:
        return f"a hidden state has {width} numbers, and the kernels take {LARGEST_ROW} at most"
    return ""
