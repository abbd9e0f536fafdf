"""How much memory loading takes, measured in a process of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from diptych.checkpoints.source import open_model

pytestmark = pytest.mark.integration

MIB = 2**20
PROGRAM = """
import json, sys, torch
from diptych.checkpoints.source import open_model
from diptych.engine.runner.model_runner import ModelRunner

def resident(kind):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[kind].split()[0]) * 1024

def load(path):
    source = open_model(path)
    layout = ModelRunner.pool_layout(source.config, num_pages=2, page_size=16, dtype="float32")
    return ModelRunner(source, torch.zeros(layout.shape), dtype="float32", attention_backend=sys.argv[3])

load(sys.argv[1])  # a small one, for what is loaded once
before = resident("VmRSS")
runner = load(sys.argv[2])
print(json.dumps([resident("VmHWM") - before, resident("VmRSS") - before]))
"""


def save(folder: Path, hidden_size: int, dtype: torch.dtype) -> list[int]:
    """Return the bytes of the shards."""
    config = transformers.LlamaConfig(
        vocab_size=4000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder, max_shard_size="12MB")
    return [path.stat().st_size for path in folder.glob("*.safetensors")]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_takes_the_weights_and_at_most_one_shard_more(tmp_path: Path, backend: str, dtype: torch.dtype) -> None:
    shards = save(tmp_path / "model", 768, dtype)
    save(tmp_path / "tiny", 64, dtype)
    assert len(shards) >= 4
    itemsize = dtype.itemsize if backend == "cpu" else 4  # the C kernels read bfloat16 as it is stored
    weights = sum(math.prod(tensor.shape) * itemsize for _, tensor in open_model(str(tmp_path / "model")).tensors())
    arguments = [str(tmp_path / "tiny"), str(tmp_path / "model"), backend]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    peak, after = json.loads(done.stdout)
    assert 0.95 * weights < after < weights + 8 * MIB
    assert peak < weights + max(shards) + 8 * MIB, (peak / MIB, weights / MIB, max(shards) / MIB)
