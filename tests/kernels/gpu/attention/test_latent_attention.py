from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
import torch
from rounding import assert_rows_are_rounded
from torch import Tensor

from diptych.kernels.gpu.attention import hopper_latent, latent_attention
from diptych.kernels.gpu.attention.decode_attention import FP8, batch_block
from diptych.kernels.gpu.attention.latent_attention import (
    LatentShape,
    LatentWorkspace,
    MergeLaunch,
    latent_decode,
    latent_extend,
    latent_splits,
    merge_launch,
    reference_latent_attention,
)

SCALE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """A step; `new_lens` None: it is a decode step."""

    seq_lens: tuple[int, ...]
    new_lens: tuple[int, ...] | None = None
    num_heads: int = 4
    rank: int = 32
    rope_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype = torch.float16
    num_splits: int = 3
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def shape(self) -> LatentShape:
        return LatentShape(self.num_heads, self.rank, self.rope_dim, self.page_size, self.dtype, self.kv_dtype)


class Step:
    """Its tensors: the middle layer of three; what no request has is NaN, and pages lie anywhere."""

    def __init__(self, case: Case, device: torch.device) -> None:
        counts = [-(-seq_len // case.page_size) for seq_len in case.seq_lens]
        num_pages, key_dim = sum(counts) + 2, case.rank + case.rope_dim
        kv = torch.randn(num_pages, 3, 1, case.page_size, 1, key_dim, device=device).to(case.kv_dtype)
        holes = kv.view(torch.uint8).view(num_pages, 3, case.page_size, -1)  # torch indexes no FP8
        order = torch.randperm(num_pages, device=device)
        holes[order[sum(counts) :]] = 0xFF
        self.page_table = torch.zeros(len(counts), max(counts, default=0) + 1, dtype=torch.int32, device=device)
        first = 0
        for request, (seq_len, count) in enumerate(zip(case.seq_lens, counts, strict=True)):
            self.page_table[request, :count] = order[first : first + count]
            if count:
                holes[order[first + count - 1], :, seq_len - (count - 1) * case.page_size :] = 0xFF
            first += count
        new_lens = case.new_lens or (1,) * len(counts)
        self.q = torch.randn(sum(new_lens), case.num_heads + 1, key_dim, device=device).to(case.dtype)[:, :-1]
        self.kv_layer = kv[:, 1]
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
        starts = torch.tensor((0, *new_lens), device=device).cumsum(0)
        self.starts = starts.to(torch.int32)


def attend(case: Case, step: Step) -> Tensor:
    out = step.q.new_full((len(step.q), case.num_heads, case.rank), float("nan"))
    arguments = step.q, step.kv_layer, step.page_table, step.seq_lens
    options: Any = {"scale": SCALE, **case.options}
    if case.new_lens is not None:
        latent_extend(*arguments, step.starts, out, case.shape, **options)
        return out
    workspace = LatentWorkspace.allocate(case.shape, case.num_splits, step.q.device)
    latent_decode(*arguments, out, workspace, case.shape, num_splits=case.num_splits, **options)
    return out


SMALL: Final = {
    "one token, page edges": Case((1, 16, 17, 64, 65, 95)),
    "one long request in many shares": Case((500,), num_splits=7),
    "more shares than tiles": Case((70, 3), num_splits=9),
    "one share": Case((100, 20), num_splits=1),
    "many heads, in two tiles": Case((90, 5), num_heads=80, num_splits=2),
    "float32, odd sizes": Case(
        (90, 5), num_heads=20, rank=30, rope_dim=14, dtype=torch.float32, kv_dtype=torch.float32
    ),
    "pages that tiles do not divide": Case((130, 99), page_size=20),
    "FP8": Case((150, 17), kv_dtype=FP8, options={"kv_scale": 0.5}),
    "prompts": Case((5, 40, 33, 70), new_lens=(5, 40, 1, 30)),
    "prompts of many heads": Case((40, 7), new_lens=(3, 7), num_heads=80),
    "prompts, float32, odd sizes": Case(
        (20, 37), new_lens=(20, 5), num_heads=5, rank=30, rope_dim=14, dtype=torch.float32, kv_dtype=torch.float32
    ),
    "prompts, FP8": Case((40, 70), new_lens=(40, 30), kv_dtype=FP8, page_size=32, options={"kv_scale": 2.0}),
}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_what_the_reference_computes_in_float64(name: str, device: torch.device) -> None:
    case = SMALL[name]
    step = Step(case, device)
    assert_right(case, step, attend(case, step))


def assert_right(case: Case, step: Step, out: Tensor) -> None:
    options: Any = {"rank": case.rank, "scale": SCALE, **case.options}
    right = reference_latent_attention(step.q, step.kv_layer, step.page_table, step.seq_lens, step.starts, **options)
    assert_rows_are_rounded(out, right, case.dtype)


def test_parts_are_added_up_in_rounds_by_programs_of_some_dimensions(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_attention, "merge_launch", lambda *_shapes: MergeLaunch(16, 2, 4))
    case = Case((600, 200), rank=40, num_splits=13)
    step = Step(case, device)
    assert_right(case, step, attend(case, step))


def test_rows_of_padding_read_nothing_and_give_zeros(device: torch.device) -> None:
    case = Case((0, 33, 0))
    out = attend(case, Step(case, device))
    assert not out[[0, 2]].any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(("num_heads", "tiles"), [(4, 1), (64, 1), (128, 2), (20, 1), (96, 2), (65, 5)])
def test_heads_are_cut_into_equal_tiles(num_heads: int, tiles: int) -> None:
    shape = LatentShape(num_heads, 512, 64, 64, torch.bfloat16, torch.bfloat16)
    assert shape.head_tiles == tiles


def test_a_batch_is_cut_into_as_many_shares_as_run_at_once_but_not_into_more_than_it_has_tiles() -> None:
    shape = LatentShape(128, 512, 64, 64, torch.bfloat16, torch.bfloat16)
    assert latent_splits(shape, 64, 4096, 132) == 66
    assert latent_splits(shape, 1, 128, 132) == 2


def test_few_requests_of_fp8_are_one_program_a_multiprocessor_and_never_need_more_room() -> None:
    shape = LatentShape(16, 512, 64, 64, torch.bfloat16, FP8)
    shares = [latent_splits(shape, batch, 163_840, 132) for batch in (1, 16, 17, 64)]
    assert shares == [132, 132, 264, 264]
    assert [shape.tile_of(batch).stages for batch in (16, 17)] == [5, 3]


@pytest.mark.parametrize(
    ("num_splits", "batch", "launch"),
    [
        (66, 64, (512, 2, 1)),
        (66, 8, (512, 8, 4)),
        (132, 8, (128, 16, 1)),
        (66, 1, (128, 64, 4)),
        (132, 1, (64, 128, 4)),
    ],
)
def test_the_more_parts_a_request_has_the_more_are_read_at_once(
    num_splits: int, batch: int, launch: tuple[int, int, int]
) -> None:
    shape = LatentShape(128, 512, 64, 64, torch.bfloat16, torch.bfloat16)
    assert merge_launch(shape, batch, num_splits) == MergeLaunch(*launch)
    assert merge_launch(replace(shape, starts_early=True), batch, num_splits) == MergeLaunch(*launch, early=True)


@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("num_heads", [16, 32, 128])
def test_batches_between_powers_of_two_are_added_up_by_what_is_compiled_for_those(
    num_heads: int, kv_dtype: torch.dtype, num_sms: int
) -> None:
    shape = LatentShape(num_heads, 512, 64, 64, torch.bfloat16, kv_dtype)

    def compiled(batch: int) -> object:
        return merge_launch(shape, batch, latent_splits(shape, batch, 1 << 20, num_sms)), batch_block(batch)

    warmed = {compiled(batch) for power in range(9) for batch in (1 << power, 3 << power)}
    assert {compiled(batch) for batch in range(1, 257)} <= warmed


@pytest.mark.parametrize(
    ("num_heads", "new_lens", "on_hopper"),
    [(16, None, False), (17, None, True), (80, None, True), (16, (5, 3), True), (80, (5, 3), True)],
)
def test_on_hopper_few_heads_alone_decode_as_anywhere(
    num_heads: int,
    new_lens: tuple[int, ...] | None,
    on_hopper: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case((20, 3), num_heads=num_heads, new_lens=new_lens, num_splits=1)
    called: list[str] = []
    monkeypatch.setattr(hopper_latent, "serves", lambda *_asked: True)
    monkeypatch.setattr(hopper_latent, "decode", lambda *_step: called.append("decode"))
    monkeypatch.setattr(hopper_latent, "extend", lambda *_step: called.append("extend"))
    out = attend(case, Step(case, device))
    assert called == ["extend" if new_lens else "decode"] * on_hopper
    assert out.isnan().all() == on_hopper


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LARGE: Final = {
    "DeepSeek V3, a batch": Case((4096, 1, 1000, 2047, 65), num_splits=66, num_heads=128, page_size=64),
    "DeepSeek V3, one request": Case((30_001,), num_splits=66, num_heads=128, page_size=64),
    "DeepSeek V3, small pages": Case((300, 64), num_splits=5, num_heads=128, page_size=16),
    "DeepSeek V3, large pages": Case((300, 129), num_splits=3, num_heads=128, page_size=128),
    "DeepSeek V3, prompts": Case((1500, 300, 4096), new_lens=(1500, 40, 100), num_heads=128, page_size=64),
    "32 heads of a rank": Case((4096, 1, 1000, 2047, 65), num_heads=32, num_splits=132, page_size=64),
    "16 heads of a rank": Case((4096, 1, 1000, 2047, 65), num_heads=16, num_splits=132, page_size=64),
    "16 heads of a rank, prompts": Case((1500, 300, 4096), num_heads=16, new_lens=(1500, 40, 100), page_size=64),
}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.usefixtures("device")
class TestOnGpus:
    pytestmark = on_gpu

    def test_large_shapes_are_what_the_reference_computes(self, name: str, kv_dtype: torch.dtype) -> None:
        shape: Any = {"rank": 512, "rope_dim": 64, "dtype": torch.bfloat16, "kv_dtype": kv_dtype}
        case = replace(LARGE[name], **shape)
        step = Step(case, torch.device("cuda"))
        assert_right(case, step, attend(case, step))
