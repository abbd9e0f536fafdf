from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from extend_steps import DTYPES, FP8, Step, forget_unseen, step
from rounding import assert_rows_are_rounded

from diptych.kernels.gpu.attention.extend_attention import (
    Tile,
    choose_tile,
    extend_attention,
    fixed_tile,
    reference_extend_attention,
)

SMALL: Final = Tile(rows=16, keys=16, num_warps=4, num_stages=2)  # several turns of each phase in few tokens


def check(step: Step, tile: Tile | None = None, **options: Any) -> None:
    options = {"scale": step["q"].shape[2] ** -0.5, **options}
    out = torch.full(step["q"].shape, torch.nan, dtype=step["q"].dtype, device=step["q"].device)
    max_extend_len = int(step["extend_starts"].diff().max())
    expected = reference_extend_attention(**step, **options)
    forget_unseen(step, options.get("window", 0), chunked=options.get("chunked", False))
    extend_attention(**step, out=out, max_extend_len=max_extend_len, tile=tile, **options)
    assert_rows_are_rounded(out[: len(expected)], expected, out.dtype)
    assert out[len(expected) :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (8, 1)])
def test_new_tokens_see_their_prefix_and_themselves(
    heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check(step([0, 40, 15, 16], [37, 1, 9, 16], device, heads=heads, dtype=dtype))


@pytest.mark.parametrize(("head_dim", "page_size"), [(16, 1), (80, 16), (128, 64), (256, 32), (512, 16)])
def test_heads_and_pages_have_any_size(head_dim: int, page_size: int, device: torch.device) -> None:
    check(step([17, 0], [5, 63], device, head_dim=head_dim, page_size=page_size))


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (16, 5.0), (21, 0.0), (40, 0.0), (1000, 0.0)])
def test_tokens_see_no_further_than_the_window(window: int, softcap: float, device: torch.device) -> None:
    check(step([0, 90, 33], [30, 20, 1], device, head_dim=16), SMALL, window=window, softcap=softcap, scale=1.0)


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (16, 5.0), (21, 0.0), (40, 0.0), (1000, 0.0)])
def test_tokens_see_their_own_chunk_up_to_themselves(window: int, softcap: float, device: torch.device) -> None:
    options: dict[str, Any] = {"window": window, "chunked": True, "softcap": softcap, "scale": 1.0}
    check(step([0, 90, 33], [30, 20, 1], device, head_dim=16), SMALL, **options)


@pytest.mark.parametrize("options", [{}, {"window": 16}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_sinks_take_part_and_have_no_value(
    heads: tuple[int, int], dtype: torch.dtype, options: Mapping[str, Any], device: torch.device
) -> None:
    sinks = torch.linspace(-2.0, 4.0, heads[0], device=device)
    check(step([0, 40, 15], [37, 1, 9], device, heads=heads, dtype=dtype), SMALL, sinks=sinks, **options)


@pytest.mark.parametrize("options", [{}, {"window": 21}, {"window": 90, "softcap": 5.0}], ids=str)
def test_tokens_see_up_to_the_ends_that_are_given(options: Mapping[str, Any], device: torch.device) -> None:
    """As rows of an image do: these blocks are of 25 places, the last one ends where its request does."""
    new = step([0, 40, 15], [37, 61, 9], device)
    lens = zip(new["seq_lens"].tolist(), new["extend_starts"].diff().tolist(), strict=True)
    ends = [torch.clamp((torch.arange(end - many, end) // 25 + 1) * 25, max=end) for end, many in lens]
    check(new | {"seen_ends": torch.cat(ends).int().to(device)}, SMALL, **options)


def test_scores_are_capped(device: torch.device) -> None:
    check(step([0, 90], [50, 20], device), softcap=2.0, scale=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_what_is_stored_times_a_scale(dtype: torch.dtype, device: torch.device) -> None:
    check(step([0, 70], [30, 20], device, dtype=dtype, kv_dtype=FP8), k_scale=0.5, v_scale=1.5)


def test_more_requests_than_are_looked_at_at_once_share_a_launch(device: torch.device) -> None:
    extend_lens = [1 + i % 3 if i % 20 == 0 or i > 125 else 0 for i in range(135)]
    check(step([i % 5 for i in range(135)], extend_lens, device, heads=(2, 1), head_dim=16), SMALL)


def test_requests_without_tokens_and_padding_behind_the_last_are_left_alone(device: torch.device) -> None:
    padded = step([3, 0, 20, 0], [4, 0, 9, 0], device)
    padded["q"] = torch.cat((padded["q"], padded["q"]))
    check(padded)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_small_where_rows_are_few(head_dim: int, dtype: torch.dtype) -> None:
    sizes = [choose_tile(4 * n, 4 * n, 8, head_dim, dtype).rows for n in (1, 4, 64, 512, 4096)]
    assert sizes == ([32] * 5 if dtype == torch.float32 else [16, 16, 64, 64, 128])


LONG: Final[Mapping[str, Mapping[str, Any]]] = {
    "32k prefix": {"prefix_lens": [32_256], "extend_lens": [512], "heads": (32, 8), "head_dim": 128},
    "whole prompt": {"prefix_lens": [0], "extend_lens": [4096], "heads": (8, 1), "head_dim": 128, "page_size": 32},
    "mixed": {"prefix_lens": [31, 0, 8191, 4096, 0], "extend_lens": [1, 1, 129, 1000, 2048], "heads": (16, 2)},
    "pages of 64": {"prefix_lens": [100, 0], "extend_lens": [3000, 1500], "heads": (8, 4), "page_size": 64},
    "heads of 256": {"prefix_lens": [0, 9000], "extend_lens": [2000, 700], "heads": (8, 4), "head_dim": 256},
    "groups of 3": {"prefix_lens": [0, 700], "extend_lens": [1025, 300], "heads": (12, 4), "head_dim": 128},
    "groups of 5": {"prefix_lens": [99, 0], "extend_lens": [333, 800], "heads": (10, 2), "page_size": 1},
    "groups of 6": {"prefix_lens": [0, 64], "extend_lens": [513, 64], "heads": (12, 2), "head_dim": 256},
    "groups of 7": {"prefix_lens": [0, 128], "extend_lens": [700, 129], "heads": (14, 2), "page_size": 128},
    "no groups": {"prefix_lens": [0, 777], "extend_lens": [1025, 1000], "heads": (16, 16), "head_dim": 128},
    "few tokens": {"prefix_lens": [16_000, 0, 8000], "extend_lens": [4, 3, 1], "heads": (32, 8), "head_dim": 128},
    "far pages": {"prefix_lens": [50], "extend_lens": [600], "heads": (32, 8), "head_dim": 128, "first_page": 40_000},
}
EDGES: Final = {"window": 1024, "softcap": 30.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("case", "options"), [*((case, {}) for case in LONG), ("mixed", EDGES), ("32k prefix", EDGES)])
def test_long_contexts_are_as_exact(case: str, options: Mapping[str, Any], kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(step(device=torch.device("cuda"), dtype=torch.bfloat16, kv_dtype=kv_dtype, **LONG[case]), **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_it_on_other_requests() -> None:
    torch.manual_seed(0)
    first, second = (
        step([110 - n, 30 + n], [n, 100 - n], torch.device("cuda"), dtype=torch.bfloat16) for n in (60, 30)
    )
    out = torch.zeros_like(first["q"])
    options: dict[str, Any] = {"max_extend_len": 70, "scale": 0.1}
    extend_attention(**first, out=out, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        extend_attention(**first, out=out, **options)
    for name, tensor in first.items():
        tensor.copy_(second[name])
    graph.replay()
    assert_rows_are_rounded(out, reference_extend_attention(**second, scale=0.1), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"window": 48, "chunked": True}, {"softcap": 20.0}],
    ids=["all", "window", "chunks", "cap"],
)
def test_by_a_fixed_tile_a_token_has_the_same_bits_as_one_of_a_prompt_and_of_an_output(
    options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    whole = step([0, 70], [150, 5], device, heads=(8, 2), dtype=dtype)
    options = {"scale": 0.125, "tile": fixed_tile(64, dtype), **options}
    expected, alone = (torch.full(whole["q"].shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    extend_attention(**whole, out=expected, max_extend_len=150, **options)
    for token in (0, 1, 47, 48, 63, 64, 127, 149):
        one = {
            "q": whole["q"][token : token + 1],
            "kv_layer": whole["kv_layer"],
            "page_table": whole["page_table"][:1],
            "seq_lens": torch.tensor([token + 1], dtype=torch.int32, device=device),
            "extend_starts": torch.tensor([0, 1], dtype=torch.int32, device=device),
        }
        extend_attention(**one, out=alone[token : token + 1], max_extend_len=1, **options)
        if device.type == "cuda":
            assert torch.equal(alone[token], expected[token]), token
        else:  # there numpy's products differ by the place of a row
            torch.testing.assert_close(alone[token], expected[token], rtol=1e-2, atol=1e-3)
