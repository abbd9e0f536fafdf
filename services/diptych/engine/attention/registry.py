"""Selects the implementation of attention, and of the arithmetic and sampling that go with it, by name.

cpu     C kernels; float32
torch   gather and scaled-dot-product attention; any dtype
auto    cpu where it can run, else torch
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.attention.backend import AttentionBackend
from diptych.engine.attention.cpu_backend import CpuAttention
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.loader.config import ModelConfig
from diptych.engine.models.cpu_ops import CpuOps
from diptych.engine.models.lora import TORCH, LowRankKernels
from diptych.engine.models.ops import Ops, TorchOps
from diptych.engine.runner.sampling import Sampler
from diptych.engine.runner.sampling.cpu_sampler import CpuSampler
from diptych.engine.runner.sampling.torch_sampler import TorchSampler
from diptych.kernels.cpu import library, low_rank
from diptych.kernels.cpu.paged_attention import MAX_HEAD_DIM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute a model."""

    attention: AttentionBackend
    ops: Ops
    low_rank: LowRankKernels
    sampler: Sampler


def choose(name: str, config: ModelConfig, kv: Tensor, dtype: torch.dtype, num_threads: int) -> Backend:
    """Build the backend called `name`. Raises `ConfigError` where this machine cannot run it."""
    if name == "auto":
        return _fastest(config, kv, dtype, num_threads)
    if name not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} is not known; auto, {', '.join(BACKENDS)} are")
    return BACKENDS[name](config, kv, dtype, num_threads)


def _fastest(config: ModelConfig, kv: Tensor, dtype: torch.dtype, num_threads: int) -> Backend:
    if dtype != torch.float32:
        return _torch(config, kv, dtype, num_threads)
    try:
        return _cpu(config, kv, dtype, num_threads)
    except ConfigError as error:
        logger.warning("the C kernels cannot run, torch computes instead, several times slower: %s", error)
        return _torch(config, kv, dtype, num_threads)


def _cpu(config: ModelConfig, kv: Tensor, dtype: torch.dtype, num_threads: int) -> Backend:
    if dtype != torch.float32:
        raise ConfigError(f"attention backend 'cpu' computes float32, not {dtype}; use 'torch'")
    if config.head_dim > MAX_HEAD_DIM:
        raise ConfigError(f"attention backend 'cpu' has no heads of {config.head_dim}; use 'torch'")
    library.set_num_threads(num_threads)
    kernels = LowRankKernels(low_rank.pack, low_rank.LowRankTable)
    return Backend(CpuAttention(config, kv), CpuOps(), kernels, CpuSampler())


def _torch(config: ModelConfig, kv: Tensor, dtype: torch.dtype, num_threads: int) -> Backend:
    return Backend(TorchAttention(config, kv, dtype), TorchOps(dtype), TORCH, TorchSampler())


BACKENDS: Final[dict[str, Callable[[ModelConfig, Tensor, torch.dtype, int], Backend]]] = {"cpu": _cpu, "torch": _torch}
