"""Experts in FP8 and in integers of four bits: GPUs keep them as stored, and compute what CPUs compute."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from prompt_logits import prompt_logits

from diptych.checkpoints.source import open_model
from diptych.engine.models.matrices.weights import load
from diptych.engine.runner.model_part import ModelPart

EXPERTS: Final = [f"0.experts.{i}.{kind}" for i in range(4) for kind in ("gate_up", "down")]
ERRORS: Final = {"fp8": 0.05, "int4": 1e-4}  # of all logits together; CPUs do not quantise states


def test_gpus_keep_experts_as_stored_and_compute_what_cpus_do(experts_checkpoint: Path, device: torch.device) -> None:
    from diptych.engine.models.arithmetic.gpu_ops import GpuOps
    from diptych.engine.models.matrices.gpu_experts import FORMATS, PackedMatrix

    part, ops = ModelPart.of(open_model(str(experts_checkpoint)), None), GpuOps(torch.float32, device)
    weights = load(part.config, part.placement, part.tensors, ops, torch.float32, device)
    matrices = [weights.matrix(name) for name in EXPERTS]
    assert {type(each) for each in matrices} == {PackedMatrix}
    codes = {code for code, form in FORMATS.items() for each in matrices if getattr(each, "form", None) == form}
    on_gpu = prompt_logits(experts_checkpoint, "triton", "auto", device).cpu()
    on_cpu = prompt_logits(experts_checkpoint, "cpu", "auto")
    assert (on_gpu - on_cpu).norm() <= max(ERRORS[code] for code in codes) * on_cpu.norm()
