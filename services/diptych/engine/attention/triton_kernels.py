"""The Triton kernels of attention as a layer calls them: over keys and values, or over latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.common.arrays import I64
from diptych.engine.attention.gpu_layers import GpuLayer
from diptych.engine.attention.hopper_prompts import HopperPrompts, PromptStep
from diptych.engine.values.limits import MAX_DRAFTS
from diptych.kernels.gpu.attention.decode_attention import (
    FEW_REQUESTS,
    Launch,
    decode_attention,
    decode_workspace,
    launch_for,
    num_splits,
    rows_together,
)
from diptych.kernels.gpu.attention.extend_attention import WIDE_DIM, extend_attention, fixed_tile
from diptych.kernels.gpu.attention.latent_attention import (
    LatentShape,
    LatentWorkspace,
    latent_decode,
    latent_extend,
    latent_splits,
)
from diptych.kernels.gpu.attention.split_extend_attention import SplitWorkspace, is_short, split_extend_attention
from diptych.kernels.gpu.hopper import shared_nbytes, starts_early
from diptych.kernels.row_groups import RowGroups

LARGEST_BATCH: Final = 4096  # requests of a decode step, unless the pool has more pages: each has one at least
INTERPRETER_SMS: Final = 2
Attend = Callable[..., None]
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)  # of states


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Some requests of a step that follow each other."""

    page_table: Tensor  # int32 [num_requests, max_pages]
    seq_lens: Tensor  # int32 [num_requests]
    groups: RowGroups | None = None  # of those that are rows of one; None: each is a request's only one


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Requests with new tokens."""

    requests: Requests
    starts: Tensor  # int32 [num_requests + 1], from the first of their tokens on
    max_len: int
    longest: int = 0  # tokens of a request, with its new ones, at most; 0: its prefix is not to be shared out
    prompts: PromptStep | None = None
    seen_ends: Tensor | None = None  # int32 [num_tokens]: see `ForwardBatch`; None: no token sees one behind itself


class AttentionKernels(Protocol):
    """`queries` `[num_tokens, num_heads, head_dim]`, rotated; `out` `[num_tokens, num_heads, value_dim]`."""

    def decode(self, at: GpuLayer, queries: Tensor, out: Tensor, requests: Requests) -> None:
        """Each request has one new token."""
        ...

    def extend(self, at: GpuLayer, queries: Tensor, out: Tensor, chunks: Chunks) -> None:
        """Each has any number of them."""
        ...

    def plan(self, extend_lens: I64, seq_lens: I64) -> PromptStep | None:
        """Return what `extend` of such a step shares between layers."""
        ...


@dataclass(frozen=True, slots=True)
class _Sharing:
    """How decode steps are launched, and into how many shares they are cut: as many as run at once."""

    launch: Launch
    num_splits: int

    @staticmethod
    def of(batch: int, config: ModelConfig, kv: Tensor) -> _Sharing:
        launch = launch_for(config.head_dim, kv.dtype, config.num_heads // config.num_kv_heads, batch)
        longest, at_once = longest_request(config, kv), launch.programs_per_sm
        shares = num_splits(batch, config.num_kv_heads, longest, num_sms(kv), at_once, launch.block)
        return _Sharing(launch, shares)


def most_rows(kv: Tensor) -> int:
    """Return how many rows of one token a decode step has at most: of each request one, and of each draft."""
    return max(LARGEST_BATCH, len(kv)) + MAX_DRAFTS


def num_sms(kv: Tensor) -> int:
    """Return the multiprocessors where a pool is."""
    return torch.cuda.get_device_properties(kv.device).multi_processor_count if kv.is_cuda else INTERPRETER_SMS


def latent_shapes(config: ModelConfig, kv: Tensor) -> Mapping[torch.dtype, LatentShape]:
    """Return what kernels are launched for where a pool of latents is, by the type of states."""
    dims = config.value_dim, config.head_dim - config.value_dim
    device = shared_nbytes(kv.device), starts_early(kv.device)
    return {dtype: LatentShape(config.num_heads, *dims, kv.shape[3], dtype, kv.dtype, *device) for dtype in DTYPES}


def longest_request(config: ModelConfig, kv: Tensor) -> int:
    """The tokens of a request at most."""
    return min(config.context_len, kv.shape[0] * kv.shape[3])


class PairKernels:
    """`AttentionKernels` for keys and values."""

    def __init__(self, config: ModelConfig, kv: Tensor, dtype: torch.dtype) -> None:
        """`dtype`: of the states."""
        self._config = config
        self._few, self._many = (_Sharing.of(batch, config, kv) for batch in (FEW_REQUESTS, LARGEST_BATCH))
        heads, batch = (config.num_heads, config.num_kv_heads, config.head_dim), most_rows(kv)
        most = max(self._few.num_splits, self._many.num_splits)
        together = rows_together(config.num_heads // config.num_kv_heads)
        self._workspace = decode_workspace(batch, *heads, most, kv.device, together)
        self._shares = SplitWorkspace.allocate(config.head_dim, kv.device) if config.head_dim <= WIDE_DIM else None
        self._prompts = HopperPrompts.of(config, kv, dtype)

    def plan(self, extend_lens: I64, seq_lens: I64) -> PromptStep | None:
        return None if self._prompts is None else self._prompts.plan(extend_lens, seq_lens)

    def decode(self, at: GpuLayer, queries: Tensor, out: Tensor, requests: Requests) -> None:
        sharing = self._few if len(queries) <= FEW_REQUESTS else self._many
        decode_attention(
            queries,
            at.kv,
            requests.page_table,
            requests.seq_lens,
            out,
            self._workspace,
            scale=self._config.score_scale,
            window=at.window,
            chunked=self._config.chunked,
            softcap=self._config.attention_softcap,
            k_scale=at.k_scale,
            v_scale=at.v_scale,
            sinks=at.sinks,
            num_splits=sharing.num_splits,
            launch=sharing.launch,
            groups=requests.groups,
        )

    def extend(self, at: GpuLayer, queries: Tensor, out: Tensor, chunks: Chunks) -> None:
        if self._prompts is not None and chunks.prompts is not None and self._prompts.attends(at):
            where = chunks.requests.page_table, chunks.requests.seq_lens, chunks.starts
            self._prompts.attend(at, queries, out, *where, chunks.prompts)
        else:
            extend_pairs(self._config, at, queries, out, chunks, self._choose(at, queries, chunks))

    def _choose(self, at: GpuLayer, queries: Tensor, chunks: Chunks) -> Attend:
        num_kv_heads, group = at.kv.shape[3], queries.shape[1] // at.kv.shape[3]
        rows = len(queries) * group, chunks.max_len * group
        if chunks.seen_ends is not None:
            return partial(extend_attention, seen_ends=chunks.seen_ends)
        if self._shares is None or not is_short(*rows, num_kv_heads, queries.shape[2]):
            return extend_attention
        return partial(split_extend_attention, workspace=self._shares, longest=chunks.longest)


class FixedOrderKernels:
    """`AttentionKernels` for keys and values, by which a token gets the same bits whatever else its step computes.

    A token of a prompt and one of an output walk the keys before them in tiles of one size, one after the other: the
    order of its sums depends on its position alone. Long contexts are not shared out among multiprocessors.
    """

    def __init__(self, config: ModelConfig, kv: Tensor) -> None:
        self._config = config
        self._starts = torch.arange(most_rows(kv) + 1, dtype=torch.int32, device=kv.device)  # of rows of one token

    def plan(self, extend_lens: I64, seq_lens: I64) -> None:
        """Nothing: what pays for a step depends on all that is in it."""

    def decode(self, at: GpuLayer, queries: Tensor, out: Tensor, requests: Requests) -> None:
        self.extend(at, queries, out, Chunks(requests, self._starts[: len(queries) + 1], 1))

    def extend(self, at: GpuLayer, queries: Tensor, out: Tensor, chunks: Chunks) -> None:
        tile = fixed_tile(self._config.head_dim, queries.dtype)
        attend = partial(extend_attention, tile=tile, seen_ends=chunks.seen_ends)
        extend_pairs(self._config, at, queries, out, chunks, attend)


def extend_pairs(
    config: ModelConfig, at: GpuLayer, queries: Tensor, out: Tensor, chunks: Chunks, attend: Attend
) -> None:
    """Attend as `AttentionKernels.extend`, by `extend_attention` or what takes the same."""
    attend(
        queries,
        at.kv,
        chunks.requests.page_table,
        chunks.requests.seq_lens,
        chunks.starts,
        out,
        max_extend_len=chunks.max_len,
        scale=config.score_scale,
        window=at.window,
        chunked=config.chunked,
        softcap=config.attention_softcap,
        k_scale=at.k_scale,
        v_scale=at.v_scale,
        sinks=at.sinks,
    )


class LatentKernels:
    """`AttentionKernels` for latents, which have neither windows nor soft caps nor sinks."""

    def __init__(self, config: ModelConfig, kv: Tensor) -> None:
        self._config = config
        self._shapes = latent_shapes(config, kv)
        self._longest, self._num_sms = longest_request(config, kv), num_sms(kv)
        most = max(self._num_shares(dtype, most_rows(kv)) for dtype in DTYPES)
        self._workspace = LatentWorkspace.allocate(self._shapes[torch.float32], most, kv.device)

    def decode(self, at: GpuLayer, queries: Tensor, out: Tensor, requests: Requests) -> None:
        shape = self._shapes[queries.dtype]
        latent_decode(
            queries,
            at.kv,
            requests.page_table,
            requests.seq_lens,
            out,
            self._workspace,
            shape,
            scale=self._config.score_scale,
            kv_scale=at.k_scale,
            num_splits=self._num_shares(queries.dtype, len(queries)),
        )

    def plan(self, extend_lens: I64, seq_lens: I64) -> None:
        """Nothing: see `LatentPrompts`."""

    def _num_shares(self, dtype: torch.dtype, batch: int) -> int:
        return latent_splits(self._shapes[dtype], batch, self._longest, self._num_sms)

    def extend(self, at: GpuLayer, queries: Tensor, out: Tensor, chunks: Chunks) -> None:
        latent_extend(
            queries,
            at.kv,
            chunks.requests.page_table,
            chunks.requests.seq_lens,
            chunks.starts,
            out,
            self._shapes[queries.dtype],
            scale=self._config.score_scale,
            kv_scale=at.k_scale,
        )


def fastest(config: ModelConfig, kv: Tensor, dtype: torch.dtype) -> AttentionKernels:
    """Return the kernels for a pool, and states of `dtype`."""
    return PairKernels(config, kv, dtype) if config.num_planes > 1 else LatentKernels(config, kv)
