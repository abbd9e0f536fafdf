"""What recurrent layers compute between their projections: of rows of several requests, and of a prompt.

An interface, and its torch implementation. States are in slots of a pool. What is for prompts computes the requests of
a step that have several tokens, and leaves others alone. On GPUs a row may have several tokens, else it has one.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.layers.recurrent import kimi_delta_rule, mamba2_scan
from diptych.engine.models.layers.recurrent.kimi_delta_rule import Decay
from diptych.engine.models.layers.recurrent.mamba2_scan import Heads
from diptych.engine.models.layers.recurrent.short_conv import convolve_prompts, convolve_step
from diptych.engine.models.layers.recurrent.turns import turns
from diptych.kernels.slot_rows import SlotRows, keep_rows


class StateRules(Protocol):
    """States are brought up to date in place. A request's slot is its own; -1, on GPUs alone, is nobody's."""

    def keep_rows(self, projected: Tensor, rows: SlotRows, given: Tensor) -> None:
        """See `slot_rows.keep_rows`."""
        ...

    def short_conv(
        self, x: Tensor, state: Tensor, rows: SlotRows, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """See `short_conv.convolve_step`."""
        ...

    def short_conv_prompts(
        self, x: Tensor, state: Tensor, batch: StagedBatch, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """See `short_conv.convolve_prompts`."""
        ...

    def kimi_delta(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, rows: SlotRows, out: Tensor
    ) -> None:
        """See `kimi_delta_rule.step`."""
        ...

    def kimi_delta_prompts(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        """See `kimi_delta_rule.in_chunks`."""
        ...

    def mamba2(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, rows: SlotRows, out: Tensor) -> None:
        """See `mamba2_scan.step`."""
        ...

    def mamba2_prompts(
        self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        """See `mamba2_scan.in_chunks`."""
        ...


class TorchStateRules:
    """Any device; every slot is somebody's. Prompts are computed in chunks."""

    short_conv_prompts = staticmethod(convolve_prompts)
    keep_rows = staticmethod(keep_rows)

    def short_conv(
        self, x: Tensor, state: Tensor, rows: SlotRows, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        convolve_step(x, state, rows.slots, weight, bias, out)

    def kimi_delta(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, rows: SlotRows, out: Tensor
    ) -> None:
        kimi_delta_rule.step(mixed, decays, betas, decay, state, rows.slots, out)

    def mamba2(self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, rows: SlotRows, out: Tensor) -> None:
        mamba2_scan.step(mixed, steps, heads, state, rows.slots, out)

    def kimi_delta_prompts(
        self, mixed: Tensor, decays: Tensor, betas: Tensor, decay: Decay, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        for tokens, own in turns(state, batch):
            kimi_delta_rule.in_chunks(mixed[tokens], decays[tokens], betas[tokens], decay, own, out[tokens])

    def mamba2_prompts(
        self, mixed: Tensor, steps: Tensor, heads: Heads, state: Tensor, batch: StagedBatch, out: Tensor
    ) -> None:
        for tokens, own in turns(state, batch):
            mamba2_scan.in_chunks(mixed[tokens], steps[tokens], heads, own, out[tokens])
