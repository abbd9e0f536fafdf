"""Prompts' attention to keys and values that are made of latents, on GPUs. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.backend import LatentHeads
from diptych.engine.attention.decompression import Decompression
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

    Its memory is there from the beginning: the step that a GPU's memory is measured by has few tokens a request, so it
    would not count what comes with the first long prompts.
    """

    def __init__(self, plan: Decompression, scale: float, dtype: torch.dtype, device: torch.device) -> None:
        """`scale`: of scores; `dtype`: of states."""
        self._plan, self._scale, self._dtype = plan, scale, dtype
        self._workspace = _Workspace.allocate(plan, dtype, device)

    @staticmethod
    def of(config: ModelConfig, page_size: int, dtype: torch.dtype, device: torch.device) -> LatentPrompts | None:
        """Return those of a model whose layers keep latents, all of them alike."""
        latent = config.latent
        if latent is None or config.still_layers or max(latent.nope_dim, latent.value_dim) > latent.rank:
            return None
        plan = Decompression(latent, config.num_heads, dtype.itemsize, page_size, config.context_len)
        return LatentPrompts(plan, config.score_scale, dtype, device)

    def pay(self, batch: StagedBatch) -> bool:
        """Whether a step takes fewer operations so."""
        return self._plan.pays(batch.host.extend_lens, batch.host.seq_lens)

    def attend(
        self, kv: Tensor, kv_scale: float, queries: Tensor, out: Tensor, batch: StagedBatch, heads: LatentHeads
    ) -> None:
        """Attend `queries` `[num_tokens, num_heads, key_dim]`, rotated, to what each request keeps.

        A query has its first `nope_dim` numbers as they were made, and at `rank` those that rotate. `out`:
        `[num_tokens, num_heads, value_dim]`. `kv` `[num_pages, 1, page_size, 1, key_dim]` is a layer of the pool; FP8
        stands for that times `kv_scale`.
        """
        starts = np.cumsum(batch.host.extend_lens).tolist()
        for begin, end, seq_len, table in zip(
            (0, *starts), starts, batch.host.seq_lens.tolist(), batch.page_table, strict=False
        ):
            entries_of = partial(self._entries, kv, kv_scale, table)
            self._attend_one(queries[begin:end], out[begin:end], seq_len, entries_of, heads)

    def _attend_one(
        self, queries: Tensor, out: Tensor, seq_len: int, entries_of: Callable[[slice], Tensor], heads: LatentHeads
    ) -> None:
        latent = self._plan.latent
        for piece in self._plan.pieces(len(queries), seq_len):
            made = self._made(entries_of(piece.keys), piece.keys.start, heads)
            own = queries[piece.tokens]
            decompressed_attention(
                own[..., : latent.nope_dim],
                own[..., latent.rank :],
                made,
                self._workspace.found,
                out[piece.tokens],
                first_position=seq_len - len(queries) + piece.tokens.start,
                scale=self._scale,
            )

    def _made(self, entries: Tensor, begin: int, heads: LatentHeads) -> Made:
        rank, shape = self._plan.latent.rank, (self._plan.num_heads, len(entries))
        keys = _shaped(self._workspace.keys, *shape, self._plan.latent.nope_dim)
        values = _shaped(self._workspace.values, *shape, self._plan.latent.value_dim)
        heads.keys_of(entries[:, :rank], keys)
        heads.values_of(entries[:, :rank], values)
        return Made(keys, values, entries[:, rank:], begin)

    def _entries(self, kv: Tensor, kv_scale: float, table: Tensor, keys: slice) -> Tensor:
        """Return what is kept of tokens, `[num_keys, key_dim]`."""
        page_size = kv.shape[2]
        pages = table[keys.start // page_size : -(-keys.stop // page_size)]
        kept = kv.view(torch.uint8)[pages].view(FP8) if kv.dtype == FP8 else kv[pages]  # torch indexes no FP8
        entries = kept.flatten(0, 3)[: keys.stop - keys.start].to(self._dtype)
        return entries if kv_scale == 1 else entries.mul_(kv_scale)


def _shaped(memory: Tensor, num_heads: int, num_keys: int, dim: int) -> Tensor:
    return memory[: num_heads * num_keys * dim].view(num_heads, num_keys, dim)
