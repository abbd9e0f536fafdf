"""`StateRules` on GPUs by our Triton kernels: steps can be captured by a graph. Nothing waits for the device."""

from __future__ import annotations

from torch import Tensor

from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.kernels.gpu.recurrent.chunk_scan import Prompts
from diptych.kernels.gpu.recurrent.kimi_delta_chunks import KimiHeads, kimi_delta_prompts
from diptych.kernels.gpu.recurrent.kimi_delta_step import kimi_delta_step
from diptych.kernels.gpu.recurrent.mamba2_chunks import MambaHeads, mamba2_prompts
from diptych.kernels.gpu.recurrent.mamba2_step import mamba2_step
from diptych.kernels.gpu.recurrent.short_conv_prompts import short_conv_prompts
from diptych.kernels.gpu.recurrent.short_conv_step import short_conv_step
from diptych.kernels.gpu.recurrent.slot_rows import keep_rows
from diptych.kernels.slot_rows import SlotRows


class TritonStateRules:
    """A slot of -1 is a padded row."""

    short_conv = staticmethod(short_conv_step)
    keep_rows = staticmethod(keep_rows)

    def short_conv_prompts(
        self, x: Tensor, state: Tensor, batch: StagedBatch, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        short_conv_prompts(x, state, prompts_of(batch), weight, bias, out)

    def kimi_delta(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, rows: SlotRows, out: Tensor
    ) -> None:
        kimi_delta_step(mixed, decays, betas, decay.rate, decay.bias, state, rows, out)

    def kimi_delta_prompts(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        kimi_delta_prompts(mixed, decays, betas, KimiHeads(*decay), state, prompts_of(batch), out)

    def mamba2(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, rows: SlotRows, out: Tensor) -> None:
        mamba2_step(mixed, steps, heads.rate, heads.bias, heads.skip, heads.min_step, state, rows, out)

    def mamba2_prompts(
        self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        constants = MambaHeads(heads.rate, heads.bias, heads.skip, heads.min_step)
        mamba2_prompts(mixed, steps, constants, state, prompts_of(batch), out)


def prompts_of(batch: StagedBatch) -> Prompts:
    """Return the requests of a step, at least one of which has several tokens."""
    assert batch.state_slots is not None
    lens = batch.host.extend_lens
    first = int((lens > 1).argmax())  # rows come before prompts
    return Prompts(batch.state_slots, batch.extend_starts, max_len=int(lens.max()), first=first)
