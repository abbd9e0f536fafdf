"""Prompts' attention on Hopper: when it pays for a step, and the memory that it takes for FP8. Nothing waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.common.arrays import I64
from diptych.engine.attention.gpu_layers import GpuLayer
from diptych.kernels.gpu.attention.decode_attention import FP8
from diptych.kernels.gpu.attention.expand_pages import expand_pages, expanded_table
from diptych.kernels.gpu.attention.prompt_attention import (
    DTYPES,
    NUM_ROWS,
    TILE,
    PromptWork,
    prompt_attention,
    serves,
    to_device,
)
from diptych.kernels.gpu.attention.split_extend_attention import is_short

EXPANDED_NBYTES: Final = 256 << 20  # of FP8 pages as 16 bits, a layer: 65,536 tokens of 8 heads of 128
LEAST_USE: Final = 0.5  # of rows of tiles: `extend_attention` has smaller ones for a few tokens each of many requests


@dataclass(frozen=True, slots=True, eq=False)
class PromptStep:
    """What all layers of a step share."""

    work: PromptWork
    expanded: Tensor | None  # int32 [num_requests, max_pages]: where FP8 pages are as 16 bits


class HopperPrompts:
    """Attends for layers that see all before them; see `prompt_attention`."""

    def __init__(self, config: ModelConfig, kv: Tensor) -> None:
        """`kv`: the pool. Its memory is there from the beginning, so the size of a pool counts it."""
        self._config, self._like = config, kv[:, 0]
        page_nbytes = 2 * 2 * TILE.keys * config.num_kv_heads * config.head_dim
        num_pages = EXPANDED_NBYTES // page_nbytes if kv.dtype == FP8 else 0
        shape = (num_pages, 2, TILE.keys, config.num_kv_heads, config.head_dim)
        self._expanded = torch.empty(shape, dtype=torch.bfloat16, device=kv.device)

    @staticmethod
    def of(config: ModelConfig, kv: Tensor, dtype: torch.dtype) -> HopperPrompts | None:
        """Return None where `prompt_attention` serves no layer of a model whose states are of `dtype`."""
        all_see = [layer for layer in range(config.num_layers) if not config.window(layer)]
        if not all_see or config.sinks or config.attention_softcap or not serves(kv):
            return None
        if dtype not in DTYPES or kv.dtype not in (dtype, FP8):
            return None
        return HopperPrompts(config, kv)

    def plan(self, extend_lens: I64, seq_lens: I64) -> PromptStep | None:
        """Return None for a step that `extend_attention` computes as fast, or that there is no memory for."""
        if not self._pays(extend_lens):
            return None
        table = None
        if self._like.dtype == FP8:
            if int(np.sum(-(-seq_lens // TILE.keys))) > len(self._expanded):
                return None
            table = to_device(expanded_table(seq_lens, TILE.keys), self._like.device)
        return PromptStep(PromptWork.of(extend_lens, seq_lens, self._like, self._config.num_heads), table)

    def _pays(self, extend_lens: I64) -> bool:
        rows = extend_lens * (self._config.num_heads // self._config.num_kv_heads)
        in_tiles = -(-rows // NUM_ROWS) * NUM_ROWS
        num_rows, longest = int(rows.sum()), int(rows.max(initial=0))
        is_few = is_short(num_rows, max(longest, NUM_ROWS), self._config.num_kv_heads, self._config.head_dim)
        return not is_few and float(rows.sum()) >= LEAST_USE * float(in_tiles.sum())

    def attends(self, at: GpuLayer) -> bool:
        """Whether it computes a layer."""
        return not at.window

    def attend(
        self,
        at: GpuLayer,
        queries: Tensor,
        out: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        starts: Tensor,
        step: PromptStep,
    ) -> None:
        """See `AttentionKernels.extend`."""
        kv = at.kv
        if step.expanded is not None:
            expanded = self._expanded.view(queries.dtype)
            expand_pages(kv, page_table, seq_lens, expanded, step.expanded)
            kv, page_table = expanded, step.expanded
        prompt_attention(
            queries,
            kv,
            page_table,
            seq_lens,
            starts,
            out,
            step.work,
            scale=self._config.score_scale,
            k_scale=at.k_scale,
            v_scale=at.v_scale,
        )
