"""The kernels for Hopper with threads for groups of warps; `TestOnGpus` of `test_latent_attention` has them there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from gluon_threads import Descriptor, kernels_of, launch
from torch import Tensor

from diptych.kernels.gpu import hopper
from diptych.kernels.gpu.attention import hopper_latent
from diptych.kernels.gpu.attention.decode_attention import FP8, LOG2_E
from diptych.kernels.gpu.attention.latent_attention import reference_latent_attention
from diptych.kernels.gpu.attention.sparse_latent_attention import reference_sparse_latent_attention

SCALE: Final = 0.05
FILE: Final = Path(hopper_latent.__file__).with_name("hopper_latent_kernel.py")
NUM_HEADS: Final = 6
KINDS: Final = pytest.mark.parametrize("kv_dtype", [torch.float16, FP8], ids=["16 bits", "FP8"])


@pytest.fixture(scope="module")
def kernels() -> Any:
    return kernels_of(FILE)


class Step:
    """Requests whose pages lie anywhere in the middle layer of three; what nobody has is NaN."""

    def __init__(
        self, seq_lens: tuple[int, ...], new_lens: tuple[int, ...], page_size: int, num_heads: int, kv_dtype: Any
    ) -> None:
        torch.manual_seed(0)
        counts = [-(-seq_len // page_size) for seq_len in seq_lens]
        pool = torch.randn(sum(counts) + 1, 3, 1, page_size, 1, 576)
        order = torch.randperm(len(pool))
        pool[order[sum(counts) :]] = torch.nan
        self.page_table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        first = 0
        for request, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
            self.page_table[request, :count] = order[first : first + count]
            if count:
                pool[order[first + count - 1], :, :, seq_len - (count - 1) * page_size :] = torch.nan
            first += count
        self.pool = pool.to(kv_dtype)
        self.kv_layer, self.page_size, self.num_heads = self.pool[:, 1], page_size, num_heads
        self.q = torch.randn(sum(new_lens), num_heads, 576).to(torch.float16)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.starts = torch.tensor((0, *new_lens)).cumsum(0).to(torch.int32)
        self.out = torch.full((len(self.q), num_heads, 512), torch.nan, dtype=torch.float16)

    def rows(self) -> Descriptor:
        num_rows = (len(self.pool) - 1) * (self.kv_layer.stride(0) // 576) + self.page_size
        return Descriptor(self.kv_layer.as_strided((num_rows, 576), (576, 1)))

    def constants(self) -> dict[str, Any]:
        page_rows = self.kv_layer.stride(0) // 576
        found = hopper_latent.constants(self.q.dtype, self.pool.dtype, self.page_size, page_rows)
        return {**found, "HEADS": self.num_heads, "DTYPE": torch.float16}

    def strides(self) -> tuple[int, int, int]:
        return self.q.stride(0), self.out.stride(0), self.page_table.stride(0)

    def assert_right(self) -> None:
        tables = self.page_table, self.seq_lens, self.starts
        right = reference_latent_attention(self.q, self.kv_layer, *tables, rank=512, scale=SCALE)
        assert torch.allclose(self.out.double(), right.nan_to_num(), atol=2e-3, rtol=2e-3)


def merge(step: Step, values: Tensor, maxima: Tensor, sums: Tensor, num_splits: int) -> None:
    """As `latent_merge_kernel` adds up parts."""
    tiles = (-(-step.seq_lens // 64)).clamp(min=1)
    ends = tiles.cumsum(0)
    share = -(-int(ends[-1]) // num_splits)
    for request, (end, count) in enumerate(zip(ends.tolist(), tiles.tolist(), strict=True)):
        first, last = (end - count) // share, (end - 1) // share
        if first == last:
            continue
        slots = torch.tensor([worker * 2 + (worker == first) for worker in range(first, last + 1)])
        grow = torch.exp2(maxima[slots] - maxima[slots].amax(0))
        total = (values[slots] * grow[..., None]).sum(0) / (sums[slots] * grow).sum(0)[:, None]
        step.out[request] = total.to(step.out.dtype)


@KINDS
@pytest.mark.parametrize(
    ("seq_lens", "page_size", "num_splits", "head_tiles"),
    [
        ((300, 64), 64, 3, 2),
        ((130, 0, 65, 1), 16, 1, 1),
        ((200, 70), 128, 5, 1),
        ((600, 511), 32, 2, 1),
    ],
    ids=[
        "shares that cut requests",
        "small pages, and nobody",
        "large pages, and more shares than tiles",
        "shares of many tiles",
    ],
)
def test_a_decode_step_is_what_the_reference_computes_in_float64(
    kernels: Any, seq_lens: tuple[int, ...], page_size: int, num_splits: int, head_tiles: int, kv_dtype: Any
) -> None:
    step = Step(seq_lens, (1,) * len(seq_lens), page_size, NUM_HEADS, kv_dtype)
    values = torch.full((2 * num_splits, NUM_HEADS, 512), torch.nan)
    maxima, sums = torch.full((2, 2 * num_splits, NUM_HEADS), torch.nan)
    launch(
        kernels["hopper_latent_decode_kernel"], num_splits * head_tiles, step.q, step.rows(), step.page_table,
        step.seq_lens, step.out, values, maxima, sums, len(seq_lens), *step.strides(), num_splits, SCALE * LOG2_E, 1.0,
        **step.constants(), HEAD_TILES=head_tiles, BATCH=16, EARLY=False,
    )  # fmt: skip
    merge(step, values, maxima, sums, num_splits)
    step.assert_right()


@KINDS
@pytest.mark.parametrize(
    ("seq_lens", "new_lens", "num_heads"),
    [
        ((70, 130, 1), (70, 3, 1), 16),
        ((200, 5), (2, 5), 128),
        ((129, 64, 90), (40, 0, 33), 6),
    ],
    ids=["several tokens a tile", "a token in two tiles", "heads that tiles do not divide, and nobody"],
)
def test_new_tokens_see_their_prefix_and_themselves(
    kernels: Any, seq_lens: tuple[int, ...], new_lens: tuple[int, ...], num_heads: int, kv_dtype: Any
) -> None:
    step = Step(seq_lens, new_lens, 16, num_heads, kv_dtype)
    num_programs = len(step.q) * num_heads // 64 + len(seq_lens)
    launch(
        kernels["hopper_latent_extend_kernel"], num_programs, step.q, step.rows(), step.page_table, step.seq_lens,
        step.starts, step.out, len(seq_lens), *step.strides(), SCALE * LOG2_E, 1.0, **step.constants(),
    )  # fmt: skip
    step.assert_right()


class Choice:
    """Rows that chose tokens anywhere in the middle layer of three; what nobody chose is NaN."""

    def __init__(self, lens: tuple[int, ...], num_kept: int, page_size: int, kv_dtype: Any) -> None:
        torch.manual_seed(0)
        counts = [min(num_seen, num_kept) for num_seen in lens]
        num_pages = -(-sum(counts) // page_size) + 2
        pool = torch.randn(num_pages, 3, 1, page_size, 1, 576)
        order = torch.randperm(num_pages * page_size).to(torch.int32)
        nobodys = order[sum(counts) :].long()
        pool[nobodys // page_size, :, 0, nobodys % page_size] = torch.nan
        self.pool = pool.to(kv_dtype)
        self.kv_layer, self.page_size = self.pool[:, 1], page_size
        self.chosen = torch.full((len(lens), num_kept), 1 << 30, dtype=torch.int32)
        for row, own in enumerate(torch.split(order[: sum(counts)], counts)):
            self.chosen[row, : len(own)] = own
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.q = torch.randn(len(lens), NUM_HEADS, 576).to(torch.float16)
        self.out = torch.full((len(lens), NUM_HEADS, 512), torch.nan, dtype=torch.float16)

    def constants(self) -> dict[str, Any]:
        page_rows = self.kv_layer.stride(0) // 576
        found = hopper_latent.chosen_constants(self.q.dtype, self.pool.dtype, self.page_size, page_rows)
        return {**found, "HEADS": NUM_HEADS, "NUM_KEPT": self.chosen.shape[1], "DTYPE": torch.float16}

    def merge(self, parts: tuple[Tensor, Tensor, Tensor], num_parts: int) -> None:
        """As `sparse_merge_kernel` adds up parts."""
        values, maxima, sums = (part.view(len(self.lens), num_parts, *part.shape[1:]) for part in parts)
        for row, count in enumerate(self.lens.clamp(max=self.chosen.shape[1]).tolist()):
            share = -(-(num_tiles := -(-count // 64)) // num_parts)
            if share == num_tiles:
                continue
            used = -(-num_tiles // share)
            grow = torch.exp2(maxima[row, :used] - maxima[row, :used].amax(0))
            total = (values[row, :used] * grow[..., None]).sum(0) / (sums[row, :used] * grow).sum(0)[:, None]
            self.out[row] = total.to(self.out.dtype)

    def assert_right(self) -> None:
        arguments = self.q, self.kv_layer, self.chosen, self.lens
        right = reference_sparse_latent_attention(*arguments, rank=512, scale=SCALE)
        assert torch.allclose(self.out.double(), right, atol=2e-3, rtol=2e-3)


@KINDS
@pytest.mark.parametrize(
    ("lens", "num_kept", "page_size", "num_parts", "head_tiles"),
    [
        ((300, 1, 0, 128), 150, 16, 1, 2),
        ((700, 65, 0, 130), 600, 64, 3, 1),
        ((70, 1), 130, 3, 5, 2),
    ],
    ids=["whole rows, one of nothing", "rows in parts", "more parts than tiles, and odd pages"],
)
def test_rows_attend_to_the_tokens_that_they_chose_wherever_these_lie(
    kernels: Any,
    lens: tuple[int, ...],
    num_kept: int,
    page_size: int,
    num_parts: int,
    head_tiles: int,
    kv_dtype: Any,
) -> None:
    rows = Choice(lens, num_kept, page_size, kv_dtype)
    values = torch.full((len(lens) * num_parts, NUM_HEADS, 512), torch.nan)
    maxima, sums = torch.full((2, len(lens) * num_parts, NUM_HEADS), torch.nan)
    launch(
        kernels["hopper_chosen_kernel"], len(lens) * num_parts * head_tiles, rows.q, rows.kv_layer, rows.chosen,
        rows.lens, rows.out, values, maxima, sums, rows.q.stride(0), rows.out.stride(0), rows.chosen.stride(0),
        num_parts, SCALE * LOG2_E, 1.0, **rows.constants(), HEAD_TILES=head_tiles,
    )  # fmt: skip
    rows.merge((values, maxima, sums), num_parts)
    rows.assert_right()


def pages(dtype: torch.dtype, page_size: int, token_stride: int = 576) -> Any:
    """What is asked of a layer's pages on a GPU."""
    strides = [3 * page_size * token_stride, page_size * token_stride, token_stride, token_stride, 1]
    return SimpleNamespace(
        device=torch.device("cuda", 0),
        dtype=dtype,
        shape=(9, 1, page_size, 1, 576),
        stride=lambda dim: strides[dim],
    )


@pytest.mark.parametrize(
    ("capability", "kv", "serves"),
    [
        ((9, 0), pages(torch.bfloat16, 64), True),
        ((9, 0), pages(FP8, 64), True),
        ((9, 0), pages(torch.bfloat16, 8), True),
        ((9, 0), pages(torch.bfloat16, 192), True),
        ((9, 0), pages(torch.bfloat16, 4), False),
        ((9, 0), pages(torch.bfloat16, 96), False),
        ((9, 0), pages(torch.float16, 64), False),
        ((9, 0), pages(torch.bfloat16, 64, token_stride=640), False),
        ((8, 0), pages(torch.bfloat16, 64), False),
        ((10, 0), pages(torch.bfloat16, 64), False),
    ],
)
def test_the_device_and_the_pages_decide_whether_they_serve(
    capability: tuple[int, int], kv: Any, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(
        major=capability[0], minor=capability[1], shared_memory_per_block_optin=hopper.SHARED_NBYTES
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: device)
    assert hopper_latent.serves((512, 64), torch.bfloat16, kv) == serves
    assert not hopper_latent.serves((256, 64), torch.bfloat16, kv)


def test_rows_choose_from_pages_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_latent, "why_not", lambda _device: None)
    odd, apart = pages(torch.bfloat16, 3), pages(torch.bfloat16, 3, token_stride=640)
    assert hopper_latent.gathers((512, 64), torch.bfloat16, odd)
    assert not hopper_latent.gathers((512, 64), torch.bfloat16, apart)
    assert not hopper_latent.serves((512, 64), torch.bfloat16, odd)


def test_tiles_are_launched_as_the_kernels_are_written(kernels: Any) -> None:
    found = [kernels[name] for name in ("KEYS", "ROWS", "BOX_DIMS", "KEY_DIM")]
    launched = (hopper_latent.TILE_TOKENS, hopper_latent.NUM_ROWS, hopper_latent.BOX, hopper_latent.WIDTH)
    assert found == list(launched)
