from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from extend_steps import DTYPES, FP8, Step, forget_unseen, step
from rounding import assert_rows_are_rounded

from diptych.kernels.gpu.attention.extend_attention import Tile, reference_extend_attention
from diptych.kernels.gpu.attention.split_extend_attention import (
    AT_ONCE,
    SLOTS,
    SplitWorkspace,
    is_short,
    num_shares,
    split_extend_attention,
    split_tile,
)

SMALL = Tile(rows=16, keys=16, num_warps=4, num_stages=2)


def check(step: Step, shares: int | None = None, tile: Tile | None = None, times: int = 1, **options: Any) -> None:
    options = {"scale": step["q"].shape[2] ** -0.5, **options}
    out = torch.full(step["q"].shape, torch.nan, dtype=step["q"].dtype, device=step["q"].device)
    new, longest = int(step["extend_starts"].diff().max()), int(step["seq_lens"].max())
    settings: dict[str, Any] = {"max_extend_len": new, "longest": longest, "tile": tile, "shares": shares, **options}
    expected = reference_extend_attention(**step, **options)
    forget_unseen(step, options.get("window", 0), chunked=options.get("chunked", False))
    workspace = SplitWorkspace.allocate(step["q"].shape[2], out.device)
    for _ in range(times):
        split_extend_attention(**step, out=out, workspace=workspace, **settings)
        assert_rows_are_rounded(out[: len(expected)], expected, out.dtype)
    assert out[len(expected) :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "shares"), [((1, 1), 1), ((4, 2), 2), ((3, 1), 9)])
def test_new_tokens_see_their_prefix_and_themselves(
    heads: tuple[int, int], shares: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(step([60, 0, 15], [1, 19, 9], device, heads=heads, dtype=dtype), shares, SMALL)


@pytest.mark.parametrize(("head_dim", "page_size"), [(16, 1), (80, 16), (128, 64)])
def test_heads_and_pages_have_any_size(head_dim: int, page_size: int, device: torch.device) -> None:
    check(step([70, 0], [5, 20], device, head_dim=head_dim, page_size=page_size), 3)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 16, "softcap": 5.0},
        {"window": 40},
        {"window": 21, "chunked": True},
        {"softcap": 2.0, "scale": 3.0},
        {"window": 21, "sinks": True},
        {"sinks": True},
    ],
    ids=str,
)
def test_windows_chunks_caps_and_sinks_are_those_of_extend_attention(
    options: dict[str, Any], device: torch.device
) -> None:
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-2.0, 4.0, 4, device=device)
    check(step([0, 60], [12, 20], device, head_dim=16), 3, SMALL, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_is_what_is_stored_times_a_scale(dtype: torch.dtype, device: torch.device) -> None:
    check(step([0, 70], [10, 20], device, dtype=dtype, kv_dtype=FP8), 3, k_scale=0.5, v_scale=1.5)


def test_requests_without_tokens_and_padding_behind_the_last_are_left_alone(device: torch.device) -> None:
    padded = step([3, 0, 70, 0], [4, 0, 9, 0], device)
    padded["q"] = torch.cat((padded["q"], padded["q"]))
    check(padded, 3, times=2)


def test_a_prefix_is_cut_as_its_length_and_the_free_multiprocessors_allow() -> None:
    tile = split_tile(256, 128, torch.bfloat16)
    shares = [num_shares(256, 256, 1, longest, 8, 128, tile) for longest in (64, 1088, 2112, 8256, 100_000)]
    assert shares == [1, 1, 2, 8, 8]
    assert num_shares(4 * 256, 256, 4, 9000, 8, 128, tile) == 2
    assert [is_short(4 * n, 4 * n, 8, 128) for n in (1, 64, 256, 257, 4096)] == [True, True, True, False, False]
    assert is_short(4096, 16, 8, 128)
    assert not is_short(4, 4, 8, 512)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_no_step_that_is_short_has_more_shares_than_the_workspace(rows: int) -> None:
    tile = Tile(rows, 64, 4, 3)
    for num_rows in range(1, 1100, 9):
        for batch in (1, 2, 7, num_rows):
            shares = num_shares(num_rows, num_rows, batch, 1 << 20, 8, 128, tile)
            assert shares == 1 or shares * 8 * (num_rows // rows + batch) <= SLOTS
            assert shares * 8 * -(-num_rows // rows) <= max(AT_ONCE, 8 * -(-num_rows // rows))


LONG: Final[Mapping[str, Mapping[str, Any]]] = {
    "64 after 8192": {"prefix_lens": [8192], "extend_lens": [64], "heads": (32, 8), "head_dim": 128},
    "groups of 7": {"prefix_lens": [32_000, 5], "extend_lens": [7, 50], "heads": (28, 4), "head_dim": 128},
    "heads of 256": {"prefix_lens": [9000, 100], "extend_lens": [3, 2], "heads": (8, 4), "head_dim": 256},
    "four requests": {"prefix_lens": [1024] * 4, "extend_lens": [64] * 4, "heads": (32, 8), "head_dim": 128},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_long_prefixes_are_shared_out(case: str, kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    long = step(**LONG[case], device=torch.device("cuda"), dtype=torch.bfloat16, kv_dtype=kv_dtype)
    check(long, times=20)
