from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
import torch
from rounding import assert_rows_are_rounded
from torch import Tensor

from diptych.kernels.gpu.attention import hopper_latent
from diptych.kernels.gpu.attention import sparse_latent_attention as sparse
from diptych.kernels.gpu.attention.decode_attention import FP8
from diptych.kernels.gpu.attention.latent_attention import LatentShape, LatentWorkspace, MergeLaunch, latent_decode
from diptych.kernels.gpu.attention.sparse_latent_attention import (
    SparseWorkspace,
    most_parts,
    parts_of_rows,
    reference_sparse_latent_attention,
    sparse_latent_attention,
)

SCALE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that see so many tokens."""

    lens: tuple[int, ...]
    num_kept: int = 150
    num_heads: int = 4
    rank: int = 32
    rope_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype = torch.float16
    num_parts: int = 1
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def shape(self) -> LatentShape:
        return LatentShape(self.num_heads, self.rank, self.rope_dim, self.page_size, self.dtype, self.kv_dtype)


class Step:
    """Its tensors: the middle layer of three; what nobody chose is NaN, and slots lie anywhere."""

    def __init__(self, case: Case, device: torch.device) -> None:
        counts = [min(num_seen, case.num_kept) for num_seen in case.lens]
        num_pages, key_dim = -(-sum(counts) // case.page_size) + 2, case.rank + case.rope_dim
        kv = torch.randn(num_pages, 3, 1, case.page_size, 1, key_dim, device=device).to(case.kv_dtype)
        order = torch.randperm(num_pages * case.page_size, device=device).to(torch.int32)
        nobodys = order[sum(counts) :].long()
        holes = kv.view(torch.uint8).view(num_pages, 3, case.page_size, -1)  # torch indexes no FP8
        holes[nobodys // case.page_size, :, nobodys % case.page_size] = 0xFF
        self.chosen = torch.full((len(counts), case.num_kept), 1 << 30, dtype=torch.int32, device=device)
        for row, own in enumerate(torch.split(order[: sum(counts)], counts)):
            self.chosen[row, : len(own)] = own
        self.q = torch.randn(len(counts), case.num_heads + 1, key_dim, device=device).to(case.dtype)[:, :-1]
        self.lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
        self.kv_layer = kv[:, 1]


def attend(case: Case, step: Step, rows: slice = slice(None)) -> Tensor:
    q = step.q[rows]
    out = q.new_full((len(q), case.num_heads, case.rank), torch.nan)
    workspace = SparseWorkspace.allocate(case.shape, len(q) * case.num_parts, q.device)
    arguments = q, step.kv_layer, step.chosen[rows], step.lens[rows], out, workspace, case.shape
    options: Any = {"scale": SCALE, **case.options}
    sparse_latent_attention(*arguments, num_parts=case.num_parts, **options)
    return out


SMALL: Final = {
    "one token, tile edges": Case((1, 63, 64, 65, 95, 300)),
    "one long row in parts": Case((500,), num_kept=450, num_parts=3),
    "more parts than tiles": Case((70, 3, 0, 500), num_parts=5),
    "many heads, in two tiles": Case((90, 5), num_heads=80, num_parts=2),
    "float32, odd sizes": Case(
        (90, 5), num_heads=20, rank=30, rope_dim=14, dtype=torch.float32, kv_dtype=torch.float32, num_parts=2
    ),
    "pages of three": Case((130, 99), page_size=3, num_kept=77),
    "one is kept": Case((130, 1), num_kept=1, num_parts=2),
    "FP8": Case((150, 17), kv_dtype=FP8, num_parts=2, options={"kv_scale": 0.5}),
}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_what_the_reference_computes_in_float64(name: str, device: torch.device) -> None:
    case = SMALL[name]
    step = Step(case, device)
    assert_right(case, step, attend(case, step))


def assert_right(case: Case, step: Step, out: Tensor) -> None:
    options: Any = {"rank": case.rank, "scale": SCALE, **case.options}
    right = reference_sparse_latent_attention(step.q, step.kv_layer, step.chosen, step.lens, **options)
    assert_rows_are_rounded(out, right, case.dtype)


def test_parts_are_added_up_in_rounds_by_programs_of_some_dimensions(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "merge_launch", lambda *_shapes: MergeLaunch(16, 2, 4))
    case = Case((600, 100), rank=40, num_kept=500, num_parts=8)
    step = Step(case, device)
    assert_right(case, step, attend(case, step))


@pytest.mark.parametrize("num_parts", [1, 3])
def test_rows_of_padding_read_nothing_and_give_zeros(num_parts: int, device: torch.device) -> None:
    case = Case((0, 33, 0, 400), num_parts=num_parts)
    out = attend(case, Step(case, device))
    assert not out[[0, 2]].any()
    assert out[[1, 3]].isfinite().all()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_row_has_the_same_bits_beside_any_others(num_parts: int, device: torch.device) -> None:
    case = Case((150, 64, 22, 399, 0), num_parts=num_parts)
    step = Step(case, device)
    together = attend(case, step)
    assert torch.equal(torch.cat([attend(case, step, slice(row, row + 1)) for row in range(5)]), together)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_that_sees_no_more_has_the_bits_of_one_that_does_not_choose(
    dtype: torch.dtype, device: torch.device
) -> None:
    """The dense kernel gives them, with one share: the tiles are the same, and so is their order."""
    case = Case((130,), page_size=16, dtype=dtype, kv_dtype=dtype)
    kv = torch.randn(12, 1, case.page_size, 1, 48, device=device).to(dtype)
    pages = torch.randperm(12, device=device)[:10].to(torch.int32)
    step = Step(case, device)
    step.kv_layer = kv
    position = torch.arange(130, device=device)
    step.chosen[0, :130] = pages[position // 16] * 16 + position.to(torch.int32) % 16
    shares = LatentWorkspace.allocate(case.shape, 1, device)
    dense = torch.empty(1, 4, 32, dtype=dtype, device=device)
    latent_decode(step.q, kv, pages[None], step.lens, dense, shares, case.shape, scale=SCALE, num_splits=1)
    assert torch.equal(attend(case, step), dense)


@pytest.mark.parametrize(("num_rows", "parts"), [(1, 32), (2, 32), (4, 16), (66, 1), (67, 1), (4096, 1)])
def test_rows_are_cut_into_parts_that_all_run_at_once(num_rows: int, parts: int) -> None:
    shape = LatentShape(128, 512, 64, 64, torch.bfloat16, torch.bfloat16)
    assert parts_of_rows(shape, num_rows, 2048, 132) == parts
    assert parts == 1 or num_rows * parts <= most_parts(shape, 132)


@pytest.mark.parametrize(("num_heads", "on_hopper"), [(16, False), (17, True), (80, True)])
def test_on_hopper_more_than_16_heads_attend_by_its_own_kernel(
    num_heads: int, on_hopper: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((20, 3), num_heads=num_heads)
    called: list[int] = []
    monkeypatch.setattr(hopper_latent, "gathers", lambda *_asked: True)
    monkeypatch.setattr(hopper_latent, "attend_to_chosen", lambda *step: called.append(step[-1]))
    out = attend(case, Step(case, device))
    assert called == [1] * on_hopper
    assert out.isnan().all() == on_hopper


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LARGE: Final = {
    "a batch": Case((4096, 1, 1000, 2047, 65), num_heads=128, page_size=64),
    "a batch in parts": Case((4096, 1, 1000, 2047, 65), num_heads=128, page_size=64, num_parts=8),
    "more heads than a tile has, odd pages": Case((4096, 1, 0, 700), num_heads=96, page_size=3, num_parts=2),
    "16 heads of a rank": Case((30_001, 300), num_heads=16, page_size=64, num_parts=32),
}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.usefixtures("device")
class TestOnGpus:
    pytestmark = on_gpu

    def test_large_shapes_are_what_the_reference_computes(self, name: str, kv_dtype: torch.dtype) -> None:
        shape: Any = {"rank": 512, "rope_dim": 64, "num_kept": 2048}
        case = replace(LARGE[name], **shape, dtype=torch.bfloat16, kv_dtype=kv_dtype)
        step = Step(case, torch.device("cuda"))
        assert_right(case, step, attend(case, step))
