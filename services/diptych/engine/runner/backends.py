"""Selects how a model is computed: attention by name, and the arithmetic and sampling that go with it.

cpu         C kernels; float32, on CPUs
torch       gather and scaled-dot-product attention; any dtype on any device: the reference
triton      our Triton kernels, on GPUs, or in Triton's interpreter
flashinfer  FlashInfer's, on GPUs, where it is installed; the arithmetic is that of triton
auto        triton on GPUs; on CPUs cpu where it can run, else torch
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.size import LINEAR
from diptych.common.errors import ConfigError
from diptych.engine.attention.backend import AttentionBackend, GraphAttention, PhasedAttention
from diptych.engine.attention.cpu_backend import CpuAttention
from diptych.engine.attention.cpu_sparse_backend import CpuSparseAttention
from diptych.engine.attention.kinds import KindsAttention, KindsGraphAttention
from diptych.engine.attention.layer_constants import Ropes
from diptych.engine.attention.sparse_attention import SparseAttention
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.models.adapters.lora import LowRankKernels, LowRankSetting, LowRankSlots
from diptych.engine.models.adapters.low_rank_tables import TableSlots, by_torch
from diptych.engine.models.arithmetic.cpu_ops import CpuOps
from diptych.engine.models.arithmetic.ops import Ops, TorchOps
from diptych.engine.runner.sampling.cpu_sampler import CpuSampler
from diptych.engine.runner.sampling.sampler import Sampler
from diptych.engine.runner.sampling.torch_sampler import TorchSampler
from diptych.kernels.cpu import library, low_rank
from diptych.kernels.cpu.paged_attention import KV_TYPES, MAX_HEAD_DIM

logger = logging.getLogger(__name__)

FLASHINFER_HEAD_DIMS: Final = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is to be computed, and where: on the device of the pool."""

    config: ModelConfig
    kv: Tensor  # [num_pages, num_layers, num_planes, page_size, num_kv_heads, head_dim]
    dtype: torch.dtype  # of states; the pool's may be narrower
    num_threads: int
    sinks: Tensor | None = None  # of the layers of `config`, see `new_sinks`
    ropes: Ropes | None = None  # see `rope_tables`; None: nobody else has made them
    layers: tuple[int, ...] = ()  # of the model, those of `config`, where there are several kinds of them
    group: int | None = None  # of pages, where there are several
    index_keys: Tensor | None = None  # [num_pages, num_layers, 1, page_size, 1, index_head_dim], of an indexer's layers
    fixed_order: bool = False  # sums are to be made in an order that does not depend on the step


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute a model."""

    attention: PhasedAttention
    ops: Ops
    low_rank: LowRankKernels
    sampler: Sampler
    only_queues: bool  # of `ops`: nothing waits to see what was computed, so that a GPU can record it


Made = tuple[AttentionBackend, GraphAttention | None]  # and again, if its decode steps can be recorded


def choose(prefill: str, decode: str, *kinds: Setting) -> Backend:
    """Build the backends of the two phases. Raises `ConfigError` where this machine cannot run one.

    A model has layers of one kind or of several: a setting for each, in the order of `ModelConfig.kinds`.
    """
    setting = kinds[0]
    names = _resolved(prefill, kinds), _resolved(decode, kinds)
    if setting.fixed_order:
        _check_fixed_order(set(names), kinds)
    if "triton" in names:
        _tell_what_is_left_out(setting.kv.device)
    made = {name: _made(name, kinds) for name in dict.fromkeys(names)}
    (of_prompts, _), (of_decodes, recordable) = made[names[0]], made[names[1]]
    attention = PhasedAttention(of_prompts, of_decodes, recordable)
    if "cpu" in names:
        return Backend(attention, CpuOps(), _cpu_slots, CpuSampler(), only_queues=False)
    is_reference = set(names) == {"torch"}
    new_ops = TorchOps if is_reference else _fixed_order_ops if setting.fixed_order else _gpu_ops
    ops = new_ops(setting.dtype, setting.kv.device)
    slots = by_torch if is_reference and not setting.kv.is_cuda else _gpu_slots
    return Backend(attention, ops, slots, TorchSampler(), only_queues=not is_reference)


def _tell_what_is_left_out(device: torch.device) -> None:
    from diptych.kernels.gpu.hopper import why_not

    reason = why_not(device)
    if device.type == "cuda" and reason is not None:
        logger.info(
            "attention of prompts and to latents is by the portable kernels, not by those for Hopper: %s", reason
        )


def narrowing(backend: Backend, dtype: torch.dtype, device: torch.device) -> Ops:
    """Return what computes in place of `backend.ops` if weights are to be made FP8. Raises `ConfigError`."""
    if not backend.only_queues:
        raise ConfigError("--quantization fp8 is for GPUs, with attention backend 'triton' or 'flashinfer': use 'auto'")
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps
    from diptych.engine.models.matrices.gpu_fp8 import has_fp8

    if not has_fp8(device):
        raise ConfigError("--quantization fp8 needs a GPU whose FP8 there are kernels for, such as an H100 or H200")
    return GpuOps(dtype, device, LINEAR)


def _check_fixed_order(names: set[str], kinds: Sequence[Setting]) -> None:
    """Raises `ConfigError` for what has kernels that add up in other orders for other steps."""
    if names not in ({"cpu"}, {"triton"}):
        wanted = "'triton' on GPUs; on CPUs 'cpu', the C kernels, which compute float32 and need a C compiler"
        found = ", ".join(sorted(names))
        raise ConfigError(f"--deterministic needs attention backend {wanted}: here it would be {found}")
    for setting in kinds if names == {"triton"} else ():
        if setting.config.num_planes == 1 or setting.index_keys is not None:
            raise ConfigError("--deterministic is not for models with latents or an indexer on GPUs yet")


def _made(name: str, kinds: Sequence[Setting]) -> Made:
    """Return a backend of all kinds of layers."""
    made = [ATTENTION[name](setting) for setting in kinds]
    if len(made) == 1:
        return made[0]
    layers, groups = [setting.layers for setting in kinds], [setting.group or 0 for setting in kinds]
    recordable = [each for _, each in made if each is not None]
    if len(recordable) == len(made):
        graphs = KindsGraphAttention(recordable, KindsAttention.places_of(recordable, layers), groups)
        return graphs, graphs
    backends = [each for each, _ in made]
    return KindsAttention(backends, KindsAttention.places_of(backends, layers), groups), None


def _resolved(name: str, kinds: Sequence[Setting]) -> str:
    """Return the name of a backend that can run here."""
    if name == "auto":
        return _fastest(kinds)
    if name not in ATTENTION:
        raise ConfigError(f"attention backend {name!r} is not known; auto, {', '.join(ATTENTION)} are")
    return name


def _fastest(kinds: Sequence[Setting]) -> str:
    if kinds[0].kv.is_cuda:
        return "triton"
    if kinds[0].dtype != torch.float32:
        return "torch"
    try:
        for setting in kinds:
            _check_cpu(setting)
    except ConfigError as error:
        logger.warning("the C kernels cannot run, torch computes instead, several times slower: %s", error)
        return "torch"
    return "cpu"


def _gpu_ops(dtype: torch.dtype, device: torch.device) -> Ops:
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps  # needs Triton, which CPUs have no use for

    return GpuOps(dtype, device)


def _cpu_slots(setting: LowRankSetting) -> LowRankSlots:
    return TableSlots(setting, low_rank.pack, low_rank.LowRankTable)


def _gpu_slots(setting: LowRankSetting) -> LowRankSlots:
    from diptych.kernels.gpu.layers.adapter_slots import AdapterSlots  # needs Triton

    return AdapterSlots(setting.num_slots, setting.max_rank, setting.matrices, setting.dtype, setting.device)


def _fixed_order_ops(dtype: torch.dtype, device: torch.device) -> Ops:
    from diptych.engine.models.arithmetic.fixed_order_ops import FixedOrderOps

    return FixedOrderOps(dtype, device)


def _cpu(setting: Setting) -> Made:
    _check_cpu(setting)
    if setting.index_keys is not None:
        return CpuSparseAttention(setting.config, setting.kv, setting.index_keys), None
    return CpuAttention(setting.config, setting.kv, setting.sinks, setting.ropes), None


def _check_cpu(setting: Setting) -> None:
    pooling = setting.config.pooling
    if pooling is not None and pooling.sees_all and setting.config.encoder is None:
        raise ConfigError("attention backend 'cpu' has no tokens that see those behind them; use 'torch'")
    if setting.kv.device.type != "cpu":
        raise ConfigError(f"attention backend 'cpu' computes on CPUs, not on {setting.kv.device}; use 'auto'")
    if setting.dtype != torch.float32:
        raise ConfigError(f"attention backend 'cpu' computes float32, not {setting.dtype}; use 'torch'")
    if setting.kv.dtype not in KV_TYPES:
        raise ConfigError(f"attention backend 'cpu' reads no KV of {setting.kv.dtype}; use 'torch'")
    if setting.config.kv_scales and setting.kv.dtype == torch.float8_e4m3fn:
        raise ConfigError("attention backend 'cpu' reads no FP8 with scales, which this model has; use 'torch'")
    indexer = setting.config.indexer
    widest = max(setting.config.head_dim, 0 if indexer is None else indexer.head_dim)
    if widest > MAX_HEAD_DIM:
        raise ConfigError(f"attention backend 'cpu' has no heads of {widest}; use 'torch'")
    library.set_num_threads(setting.num_threads)


def _torch(setting: Setting) -> Made:
    if setting.index_keys is None:
        return TorchAttention(setting.config, setting.kv, setting.dtype, setting.sinks, setting.ropes), None
    if setting.kv.dtype == torch.float8_e4m3fn:
        raise ConfigError("attention backend 'torch' reads no FP8 KV in sparse attention; give --kv-cache-dtype auto")
    return SparseAttention(setting.config, setting.kv, setting.index_keys, setting.dtype), None


def _triton(setting: Setting) -> Made:
    _check_gpu("triton", setting)
    if setting.index_keys is not None:
        return _triton_sparse(setting, setting.index_keys)
    from diptych.engine.attention.latent_prompts import LatentPrompts
    from diptych.engine.attention.triton_backend import TritonAttention
    from diptych.engine.attention.triton_kernels import FixedOrderKernels, fastest

    prompts = LatentPrompts.of(setting.config, setting.kv.shape[3], setting.dtype, setting.kv.device)
    what = setting.config, setting.kv
    kernels = FixedOrderKernels(*what) if setting.fixed_order else fastest(*what, setting.dtype)
    attention = TritonAttention(*what, kernels, setting.sinks, setting.ropes, prompts)
    return attention, attention


def _triton_sparse(setting: Setting, index_keys: Tensor) -> Made:
    from diptych.engine.attention.triton_sparse_backend import TritonSparseAttention

    attention = TritonSparseAttention(setting.config, setting.kv, index_keys)
    return attention, attention


def _flashinfer(setting: Setting) -> Made:
    _check_gpu("flashinfer", setting)
    if setting.config.sinks:
        raise ConfigError("attention backend 'flashinfer' knows no attention sinks, which this model has; use 'triton'")
    if setting.config.sees_images_whole:
        words = "attention backend 'flashinfer' has no images whose rows see each other, which this model has"
        raise ConfigError(f"{words}; use 'triton'")
    if setting.config.chunked:
        raise ConfigError("attention backend 'flashinfer' knows windows that slide, and no chunks; use 'triton'")
    if setting.group is not None:
        words = "attention backend 'flashinfer' has layers with a window share their pages with all others"
        raise ConfigError(f"{words}: give --kv-windows keep, or use 'triton'")
    if setting.layers:
        raise ConfigError("attention backend 'flashinfer' attends to layers of one kind; use 'triton'")
    if setting.config.num_planes == 1:
        raise ConfigError("attention backend 'flashinfer' attends to keys and values, not to latents; use 'triton'")
    if find_spec("flashinfer") is None:
        raise ConfigError(
            "attention backend 'flashinfer' is not installed: install diptych[flashinfer], or use 'triton'"
        )
    if setting.dtype == torch.float32 or setting.config.head_dim not in FLASHINFER_HEAD_DIMS:
        head_dims = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        raise ConfigError(
            f"attention backend 'flashinfer' is for two-byte states and heads of {head_dims}; use 'triton'"
        )
    from diptych.engine.attention.flashinfer_backend import FlashInferAttention

    attention = FlashInferAttention(setting.config, setting.kv, setting.dtype)
    return attention, attention


def _check_gpu(name: str, setting: Setting) -> None:
    if not setting.kv.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"attention backend {name!r} computes on GPUs; use 'auto' where there is none")
    head_dim = setting.config.head_dim
    if setting.config.qk_norm in ("heads", "unweighted") and head_dim & (head_dim - 1):
        raise ConfigError(f"attention backend {name!r} norms no heads of {head_dim}, only powers of 2; use 'torch'")


ATTENTION: Final[dict[str, Callable[[Setting], Made]]] = {
    "cpu": _cpu,
    "torch": _torch,
    "triton": _triton,
    "flashinfer": _flashinfer,
}
