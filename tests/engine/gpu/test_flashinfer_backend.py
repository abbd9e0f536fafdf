"""FlashInfer, where it is installed, gives what the reference gives, and leaves the same KV behind.

Over FP8 with scales only, where one kernel, which it compiles in half a minute, serves prompts and decode steps.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from attention_pools import Pools
from tiny_config import tiny_config
from torch import Tensor

from diptych.architectures.config import ModelConfig, Rope
from diptych.engine.attention.backend import GraphAttention
from diptych.engine.attention.staged_batch import stage
from diptych.engine.runner.gpu.ladder import pad
from diptych.engine.values.batch import ForwardMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs FlashInfer"),
]
CONFIG = tiny_config(head_dim=128, num_heads=8, rope=Rope(1e4, 128), kv_scales=((0.5, 0.03), (0.02, 2.0)))
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def new(config: ModelConfig, kv: Tensor, sinks: Tensor | None) -> GraphAttention:
    assert sinks is None, "not known to it"
    from diptych.engine.attention.flashinfer_backend import FlashInferAttention

    return FlashInferAttention(config, kv, BF16)


def new_pools() -> Pools:
    return Pools(CONFIG, FP8, torch.device("cuda"), new, BF16, tolerance=3e-2)


def test_prompts_in_parts_mixed_steps_and_single_tokens_are_as_in_the_reference() -> None:
    pools = new_pools()
    pools.extend({"a": 9, "b": 1})
    pools.extend({"b": 1, "a": 6, "c": 4}, ForwardMode.MIXED)
    pools.decode(["a", "b", "c"])


def test_a_recorded_step_attends_to_the_lengths_of_its_replay() -> None:
    pools = new_pools()
    pools.extend({"a": 5})
    recorded, second = (
        stage(pad(pools.batch({"a": 1}, ForwardMode.DECODE), 2), torch.device("cuda")) for _ in range(2)
    )
    (qkv, out), (again, expected) = pools.states(2)
    pools.backend.capture_metadata(recorded)
    pools.backend.forward_decode(qkv.clone(), 0, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pools.backend.forward_decode(qkv, 0, out)
    for name in ("positions", "out_slots", "page_table", "seq_lens"):
        getattr(recorded, name).copy_(getattr(second, name))
    qkv.copy_(again)
    pools.backend.replay_metadata(replace(recorded, host=second.host))
    graph.replay()
    pools.backend.init_forward_metadata(second)
    pools.backend.forward_decode(again, 0, expected)
    assert expected[0].isfinite().all()
    torch.testing.assert_close(out[0], expected[0], atol=3e-2, rtol=3e-2)
