"""Prompts' attention to keys and values that are made of latents, on GPUs. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.backend import LatentHeads
from diptych.engine.attention.decompression import Decompression
from diptych.engine.attention.gpu_layers import GpuLayer
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.kernels.gpu.attention.decode_attention import FP8
from diptych.kernels.gpu.attention.decompressed_attention import Found, Made, decompressed_attention


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Serves one piece after the other."""

    keys: Tensor  # what pieces are views of
    values: Tensor
    found: Found

    @staticmethod
    def allocate(plan: Decompression, dtype: torch.dtype, device: torch.device) -> _Workspace:
        made, sizes = plan.num_heads * plan.piece_len, (plan.latent.nope_dim, plan.latent.value_dim)
        keys, values = (torch.empty(made * size, dtype=dtype, device=device) for size in sizes)
        return _Workspace(keys, values, Found.allocate(plan.block_len, plan.num_heads, sizes[1], device))


class LatentPrompts:
    """Computes a layer of a step in which all requests have many new tokens.

    Its memory comes with the first such step, whatever its lengths: of a worker that computes prompts, while it
    measures what its largest step takes.
    """

    def __init__(self, plan: Decompression, scale: float, dtype: torch.dtype) -> None:
        """`scale`: of scores; `dtype`: of states."""
        self._plan, self._scale, self._dtype = plan, scale, dtype
        self._workspace: _Workspace | None = None

    @staticmethod
    def of(config: ModelConfig, page_size: int, dtype: torch.dtype) -> LatentPrompts | None:
        """Return those of a model whose layers keep latents, all of them alike."""
        latent = config.latent
        if latent is None or config.still_layers or max(latent.nope_dim, latent.value_dim) > latent.rank:
            return None
        plan = Decompression(latent, config.num_heads, dtype.itemsize, page_size, config.context_len)
        return LatentPrompts(plan, config.score_scale, dtype)

    def pay(self, batch: StagedBatch) -> bool:
        """Whether a step takes fewer operations so."""
        return self._plan.pays(batch.host.extend_lens, batch.host.seq_lens)

    def attend(self, at: GpuLayer, queries: Tensor, out: Tensor, batch: StagedBatch, heads: LatentHeads) -> None:
        """Attend `queries` `[num_tokens, num_heads, key_dim]`, rotated, to what each request keeps.

        A query has its first `nope_dim` numbers as they were made, and at `rank` those that rotate. `out`:
        `[num_tokens, num_heads, value_dim]`.
        """
        if self._workspace is None:
            self._workspace = _Workspace.allocate(self._plan, self._dtype, queries.device)
        lens = zip(batch.host.extend_lens.tolist(), batch.host.seq_lens.tolist(), strict=True)
        first = 0
        for (new_len, seq_len), table in zip(lens, batch.page_table, strict=True):
            rows = slice(first, first + new_len)
            for piece in self._plan.pieces(new_len, seq_len):
                made = self._make(piece.keys, at, table, heads, self._workspace)
                first_position = seq_len - new_len + piece.tokens.start
                own = queries[rows][piece.tokens]
                decompressed_attention(
                    own[..., : self._plan.latent.nope_dim],
                    own[..., self._plan.latent.rank :],
                    made,
                    self._workspace.found,
                    out[rows][piece.tokens],
                    first_position=first_position,
                    scale=self._scale,
                )
            first += new_len

    def _make(self, keys: slice, at: GpuLayer, table: Tensor, heads: LatentHeads, workspace: _Workspace) -> Made:
        entries, rank = self._entries(keys, at, table), self._plan.latent.rank
        shape = self._plan.num_heads, len(entries)
        made_keys = _shaped(workspace.keys, *shape, self._plan.latent.nope_dim)
        made_values = _shaped(workspace.values, *shape, self._plan.latent.value_dim)
        heads.keys_of(entries[:, :rank], made_keys)
        heads.values_of(entries[:, :rank], made_values)
        return Made(made_keys, made_values, entries[:, rank:], keys.start)

    def _entries(self, keys: slice, at: GpuLayer, table: Tensor) -> Tensor:
        """Return what is kept of tokens, `[num_keys, key_dim]`."""
        page_size = at.kv.shape[2]
        pages = table[keys.start // page_size : -(-keys.stop // page_size)]
        kept = at.kv.view(torch.uint8)[pages].view(FP8) if at.kv.dtype == FP8 else at.kv[pages]  # torch indexes no FP8
        entries = kept.flatten(0, 3)[: keys.stop - keys.start].to(self._dtype)
        return entries if at.k_scale == 1 else entries.mul_(at.k_scale)


def _shaped(memory: Tensor, num_heads: int, num_keys: int, dim: int) -> Tensor:
    return memory[: num_heads * num_keys * dim].view(num_heads, num_keys, dim)
