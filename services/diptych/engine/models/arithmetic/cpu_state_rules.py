"""`StateRules` by the C kernels: float32 on the CPU.

A prompt's tokens are computed one by one, too: so they have the same bits however the prompt is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent import kimi_delta_rule, mamba2_scan
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.engine.models.layers.recurrent.short_conv import convolve_prompts, convolve_step
from diptych.engine.models.layers.recurrent.turns import turns
from diptych.kernels.cpu import recurrences
from diptych.kernels.slot_rows import SlotRows, keep_rows


class CpuStateRules:
    """Every slot is somebody's."""

    short_conv_prompts = staticmethod(convolve_prompts)
    keep_rows = staticmethod(keep_rows)

    def short_conv(
        self, x: Tensor, state: Tensor, rows: SlotRows, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        convolve_step(x, state, rows.slots, weight, bias, out)

    def kimi_delta(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, rows: SlotRows, out: Tensor
    ) -> None:
        starts = torch.arange(len(rows.slots) + 1)
        self._kimi_delta(mixed, decays, betas, decay, state, starts, rows.slots, out)

    def kimi_delta_prompts(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        for tokens, own in turns(state, batch):
            self.kimi_delta_prompt(mixed[tokens], decays[tokens], betas[tokens], decay, own, out[tokens])

    def kimi_delta_prompt(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, out: Tensor
    ) -> None:
        """Compute several tokens of one request; `state` is its own."""
        self._kimi_delta(mixed, decays, betas, decay, state[None], *_one_request(mixed), out)

    @staticmethod
    def _kimi_delta(
        mixed: Tensor,
        decays: Tensor,
        betas: Tensor,
        decay: Decay,
        state: Tensor,
        starts: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> None:
        queries, keys, values, logs, sizes = kimi_delta_rule.prepare(mixed, decays, betas, decay)
        queries, keys, values = (each.contiguous() for each in (queries, keys, values))
        recurrences.kimi_delta(queries, keys, logs.exp(), values, sizes.contiguous(), state, starts, slots, out)

    def mamba2(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, rows: SlotRows, out: Tensor) -> None:
        self._mamba2(mixed, steps, heads, state, torch.arange(len(rows.slots) + 1), rows.slots, out)

    def mamba2_prompts(
        self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        for tokens, own in turns(state, batch):
            self.mamba2_prompt(mixed[tokens], steps[tokens], heads, own, out[tokens])

    def mamba2_prompt(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, out: Tensor) -> None:
        """Compute several tokens of one request; `state` is its own."""
        self._mamba2(mixed, steps, heads, state[None], *_one_request(mixed), out)

    @staticmethod
    def _mamba2(
        mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, starts: Tensor, slots: Tensor, out: Tensor
    ) -> None:
        amounts, writing, reading, logs, skipped = mamba2_scan.prepare(mixed, steps, heads)
        given = amounts.view(out.shape), writing.contiguous(), reading.contiguous(), logs.exp().view(steps.shape)
        recurrences.state_spaces(*given, state, starts, slots, out)
        out.add_(skipped.view(out.shape))


def _one_request(mixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the tokens of a request alone start and end, and its slot."""
    return torch.tensor([0, len(mixed)]), torch.zeros(1, dtype=torch.int64)
