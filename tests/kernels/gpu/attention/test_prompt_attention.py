"""On a Hopper GPU alone: the kernel is for it, and no interpreter knows its copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest
import torch
from extend_steps import FP8, Step, step
from rounding import assert_rows_are_rounded

from diptych.kernels.gpu.attention.expand_pages import expand_pages, expanded_table
from diptych.kernels.gpu.attention.extend_attention import reference_extend_attention
from diptych.kernels.gpu.attention.prompt_attention import TILE, PromptWork, prompt_attention, serves

HOPPER: Final = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "whole prompt": {"prefix_lens": [0], "extend_lens": [4096], "heads": (8, 1)},
    "32k prefix": {"prefix_lens": [32_256], "extend_lens": [512], "heads": (32, 8)},
    "ragged": {"prefix_lens": [31, 0, 0, 8191, 4096, 0], "extend_lens": [1, 1, 0, 129, 1000, 2048], "heads": (16, 2)},
    "tiles that end where a request does": {
        "prefix_lens": [128, 0, 120],
        "extend_lens": [128, 256, 8],
        "heads": (8, 2),
    },
    "heads of 64": {"prefix_lens": [100, 0], "extend_lens": [3000, 1500], "heads": (8, 4), "head_dim": 64},
    "groups of 3": {"prefix_lens": [0, 700], "extend_lens": [1025, 300], "heads": (12, 4)},
    "groups of 7": {"prefix_lens": [0, 128], "extend_lens": [700, 129], "heads": (14, 2), "page_size": 128},
    "no groups": {"prefix_lens": [0, 777], "extend_lens": [1025, 1000], "heads": (16, 16), "page_size": 32},
    "pages of 8": {"prefix_lens": [11], "extend_lens": [600], "heads": (4, 1), "page_size": 8},
    "far pages": {"prefix_lens": [50], "extend_lens": [600], "heads": (32, 8), "first_page": 40_000},
}


def attend(step: Step, **options: Any) -> torch.Tensor:
    """What is no row of a request stays NaN."""
    q, kv = step["q"], step["kv_layer"]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    lens = step["extend_starts"].diff().cpu().numpy().astype(np.int64), step["seq_lens"].cpu().numpy().astype(np.int64)
    if kv.dtype == FP8:
        table = expanded_table(lens[1], TILE.keys)
        pool = kv.new_full((int(table.max()) + 1, 2, TILE.keys, *kv.shape[3:]), torch.nan, dtype=q.dtype)
        new_table = torch.from_numpy(table).to(q.device)
        expand_pages(kv, step["page_table"], step["seq_lens"], pool, new_table)
        step = {**step, "kv_layer": pool, "page_table": new_table}
    assert serves(step["kv_layer"])
    work = PromptWork.of(*lens, step["kv_layer"], q.shape[1])
    prompt_attention(**step, out=out, work=work, **options)
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_new_tokens_see_their_prefix_and_themselves(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = step(device=torch.device("cuda"), dtype=dtype, **{"head_dim": 128, **CASES[case]})
    expected = reference_extend_attention(**made, scale=0.1)
    assert_rows_are_rounded(attend(made, scale=0.1), expected, dtype)


@pytest.mark.parametrize("case", ["ragged", "32k prefix", "groups of 7"])
def test_float8_is_what_is_stored_times_a_scale(case: str) -> None:
    torch.manual_seed(0)
    made = step(device=torch.device("cuda"), dtype=torch.bfloat16, kv_dtype=FP8, **{"head_dim": 128, **CASES[case]})
    scales: dict[str, Any] = {"scale": 0.1, "k_scale": 0.5, "v_scale": 1.5}
    assert_rows_are_rounded(attend(made, **scales), reference_extend_attention(**made, **scales), torch.bfloat16)


def test_padding_behind_the_last_request_is_left_alone() -> None:
    made = step([3, 0, 20], [40, 0, 900], torch.device("cuda"), heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    made["q"] = torch.cat((made["q"], made["q"]))
    out = attend(made, scale=0.1)
    assert_rows_are_rounded(out[:940], reference_extend_attention(**made, scale=0.1), torch.bfloat16)
    assert out[940:].isnan().all()


def test_a_graph_replays_it() -> None:
    torch.manual_seed(0)
    made = step([100, 0], [700, 900], torch.device("cuda"), heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    lens = np.array([700, 900]), np.array([800, 900])
    work, out = PromptWork.of(*lens, made["kv_layer"], 8), torch.zeros_like(made["q"])
    prompt_attention(**made, out=out, work=work, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prompt_attention(**made, out=out, work=work, scale=0.1)
    made["q"].normal_()
    graph.replay()
    assert_rows_are_rounded(out, reference_extend_attention(**made, scale=0.1), torch.bfloat16)
