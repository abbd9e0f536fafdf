"""The experts of a mixture all at once, in two grouped products: nothing waits for the GPU, a graph can capture it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diptych.engine.models.matrix import Activate
from diptych.kernels.gpu.moe import ExpertWeights, align_experts, choose_block, grouped_gemm
from diptych.kernels.gpu.moe_combine import combine_experts


class GroupedExperts:
    """`Experts` whose weights `[num_rows, num_columns]` stay where they are."""

    def __init__(self, gate_up: Sequence[Tensor], down: Sequence[Tensor], activate: Activate) -> None:
        self._gate_up = ExpertWeights.of(gate_up)
        self._down = ExpertWeights.of(down)
        self._activate = activate

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        if not len(x):  # the last layer of a step that nobody samples from
            return
        ffn_size, rows, num_experts = self._down.tensors[0].shape[1], chosen.numel(), len(self._down.tensors)
        aligned = align_experts(chosen, num_experts, choose_block(rows, num_experts))
        gate_up, activated = x.new_empty(rows, 2 * ffn_size), x.new_empty(rows, ffn_size)
        results = x.new_empty(rows, x.shape[1])
        grouped_gemm(x, self._gate_up, aligned, gate_up)
        self._activate(gate_up, activated)
        grouped_gemm(activated, self._down, aligned, results)
        combine_experts(results, chosen, shares, out)
