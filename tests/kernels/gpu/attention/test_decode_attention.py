from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from rounding import UNITS, assert_rows_are_rounded
from torch import Tensor

from diptych.kernels.gpu.attention.decode_attention import (
    decode_attention,
    decode_workspace,
    launch_for,
    num_splits,
    reference_decode_attention,
    rows_together,
)
from diptych.kernels.gpu.attention.rope_store import rope_store
from diptych.kernels.row_groups import RowGroups, row_groups

FP8: Final = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Case:
    """A decode step."""

    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    kv_dtype: torch.dtype = torch.float16
    dtype: torch.dtype = torch.float16
    num_splits: int = 3
    options: Mapping[str, float] | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Its tensors."""

    q: Tensor
    kv_layer: Tensor
    page_table: Tensor
    seq_lens: Tensor
    sinks: Tensor | None = None

    @classmethod
    def random(cls, case: Case, device: torch.device) -> Step:
        """The middle layer of three; what no request sees is NaN, and pages lie anywhere."""
        window = int((case.options or {}).get("window", 0))
        counts = [-(-seq_len // case.page_size) for seq_len in case.seq_lens]
        num_pages, width = sum(counts) + 2, case.num_heads + 2 * case.num_kv_heads
        shape = (num_pages, 3, 2, case.page_size, case.num_kv_heads, case.head_dim)
        kv = torch.randn(shape, device=device, dtype=torch.float32).to(case.kv_dtype)
        qkv = torch.randn(len(case.seq_lens), width, case.head_dim, device=device, dtype=torch.float32).to(case.dtype)
        page_table = torch.zeros(len(case.seq_lens), max(counts, default=0) + 1, dtype=torch.int32, device=device)
        order = torch.randperm(num_pages, device=device)
        holes = kv.view(torch.uint8).view(num_pages, 3, 2, case.page_size, -1)  # torch indexes no FP8
        holes[order[sum(counts) :]] = 0xFF
        first = 0
        for request, (seq_len, count) in enumerate(zip(case.seq_lens, counts, strict=True)):
            pages = order[first : first + count]
            page_table[request, :count] = pages
            places = torch.arange(count * case.page_size, device=device).view(count, case.page_size)
            unseen = (places >= seq_len) | (places < (seq_len - window if window else 0))
            at_page, offset = unseen.nonzero(as_tuple=True)
            holes[pages[at_page], :, :, offset] = 0xFF
            first += count
        seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
        sinks = torch.linspace(-2.0, 4.0, case.num_heads, device=device) if case.has_sinks else None
        return cls(qkv[:, : case.num_heads], kv[:, 1], page_table, seq_lens, sinks)


def attend(case: Case, step: Step, **changed: Any) -> Tensor:
    shape = (len(step.q), case.num_heads, case.num_kv_heads, case.head_dim, case.num_splits)
    workspace = changed.pop("workspace", None) or decode_workspace(*shape, step.q.device)
    out = torch.full_like(step.q, float("nan"), memory_format=torch.contiguous_format)
    options = {"scale": case.head_dim**-0.5, "num_splits": case.num_splits, "sinks": step.sinks}
    options |= {**(case.options or {}), **changed}
    decode_attention(step.q, step.kv_layer, step.page_table, step.seq_lens, out, workspace, **options)
    assert not workspace.arrived.any()
    return out


def assert_right(case: Case, out: Tensor, step: Step) -> None:
    options: Any = {"scale": case.head_dim**-0.5, "sinks": step.sinks, **(case.options or {})}
    right = reference_decode_attention(step.q, step.kv_layer, step.page_table, step.seq_lens, **options)
    assert_rows_are_rounded(out, right, max(case.dtype, case.kv_dtype, key=lambda dtype: UNITS.get(dtype, 0.0)))
    assert not out[step.seq_lens == 0].any()


SMALL: Final = {
    "one token, full pages, page edges": Case((1, 16, 17, 64, 65, 95)),
    "padding rows": Case((0, 33, 0, 0, 128, 0), num_splits=2),
    "nothing but padding": Case((0, 0), num_splits=2),
    "one long request in many shares": Case((500,), num_splits=7),
    "more parts than are read at once": Case((2100, 3), num_heads=1, num_kv_heads=1, head_dim=512, num_splits=70),
    "more shares than tiles": Case((70, 3), num_splits=9),
    "one share": Case((100, 20), num_splits=1),
    "no GQA": Case((40,), num_heads=2, num_kv_heads=2),
    "a group of 3, odd head size": Case((150,), num_heads=3, num_kv_heads=1, head_dim=80),
    "a group of 8, heads of 128": Case((150,), num_heads=8, num_kv_heads=1, head_dim=128, page_size=32),
    "heads of 256": Case((140,), num_heads=2, num_kv_heads=1, head_dim=256, page_size=64),
    "pages that tiles do not divide": Case((230, 99, 101), page_size=100),
    "float32": Case((90, 5), dtype=torch.float32, kv_dtype=torch.float32, page_size=64),
    "window": Case((200, 10, 64), options={"window": 70}),
    "chunks": Case((0, 200, 10, 70, 71, 140), options={"window": 70, "chunked": True}),
    "chunks in a tile, many shares": Case((201, 10), num_splits=7, options={"window": 3, "chunked": True}),
    "sinks": Case((0, 1, 200, 64), has_sinks=True),
    "sinks, one long request in many shares": Case((500,), num_splits=7, has_sinks=True),
    "sinks, a group of 3, window, soft cap": Case(
        (150, 9), num_heads=3, num_kv_heads=1, options={"window": 70, "softcap": 2.0}, has_sinks=True
    ),
    "sinks, FP8": Case((150, 17), kv_dtype=FP8, options={"k_scale": 0.5, "v_scale": 2.0}, has_sinks=True),
    "window in a tile, soft cap": Case((200, 10), options={"window": 3, "softcap": 2.0}),
    "FP8": Case((150, 17), kv_dtype=FP8, options={"k_scale": 0.5, "v_scale": 2.0}),
    "FP8, float32 queries": Case((90,), kv_dtype=FP8, dtype=torch.float32, num_kv_heads=1, page_size=64),
}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_what_the_reference_computes_in_float64(name: str, device: torch.device) -> None:
    case = SMALL[name]
    step = Step.random(case, device)
    assert_right(case, attend(case, step), step)


def test_a_workspace_serves_other_batches_and_an_empty_request_hides_nothing(device: torch.device) -> None:
    large, small = Case((60, 0, 100)), Case((130,), num_splits=2)
    workspace = decode_workspace(3, 4, 2, 64, 3, device)
    for case in (large, small, large):
        step = Step.random(case, device)
        assert_right(case, attend(case, step, workspace=workspace), step)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.float32, FP8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 32])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_tile_is_two_powers_and_all_programs_of_a_multiprocessor_have_registers(
    batch: int, group: int, head_dim: int, kv_dtype: torch.dtype
) -> None:
    launch = launch_for(head_dim, kv_dtype, group, batch)
    assert launch.block in (16, 32, 64, 128)
    assert launch.max_registers * 32 * launch.num_warps * launch.programs_per_sm <= 65536
    assert launch.max_registers >= 128


def test_a_batch_is_cut_into_as_many_shares_as_run_at_once_but_not_into_more_than_it_has_tiles() -> None:
    assert num_splits(64, 8, 8192, 132) == 132 * 3 // 8
    assert num_splits(1, 1, 8192, 132, programs_per_sm=4) == 8192 // 64
    assert num_splits(1, 8, 10, 132) == 1
    assert num_splits(8, 512, 8192, 132) == 1


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS: Final = (1, 15, 16, 17, 63, 64, 65, 0, 127, 128, 129, 1000, 2047, 2048, 2049, 4096, 0, 333)
LLAMA: Final = Case(LENGTHS, num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, num_splits=49)
CONTEXTS: Final = {
    "32k, one request": (32_768,),
    "32k, one token more": (32_769,),
    "32k beside short ones": (32_767, 1, 30_000, 64, 0, 65, 4097),
    "a large batch": tuple(range(0, 1200, 4)),
}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
class TestOnGpu:
    """Larger shapes, and bfloat16, which the interpreter can't multiply."""

    pytestmark = on_gpu

    @staticmethod
    def assert_right(kv_dtype: torch.dtype, **changed: Any) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if kv_dtype == FP8 else kv_dtype
        case = replace(LLAMA, kv_dtype=kv_dtype, dtype=dtype, **changed)
        step = Step.random(case, torch.device("cuda"))
        assert_right(case, attend(case, step), step)

    @pytest.mark.parametrize("page_size", [1, 8, 16, 24, 32, 64, 100, 128])
    def test_page_edges(self, kv_dtype: torch.dtype, page_size: int) -> None:
        self.assert_right(kv_dtype, page_size=page_size)

    @pytest.mark.parametrize(
        ("group", "head_dim"),
        [(1, 64), (2, 128), (3, 80), (4, 64), (4, 256), (5, 128), (6, 64), (7, 128), (8, 256), (32, 128)],
    )
    def test_heads(self, kv_dtype: torch.dtype, group: int, head_dim: int) -> None:
        self.assert_right(kv_dtype, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, num_splits=21)

    @pytest.mark.parametrize("num_splits", [1, 2, 16, 66, 200])
    @pytest.mark.parametrize("name", CONTEXTS)
    def test_contexts_and_shares(self, kv_dtype: torch.dtype, name: str, num_splits: int) -> None:
        self.assert_right(kv_dtype, seq_lens=CONTEXTS[name], num_splits=num_splits, num_heads=8, num_kv_heads=2)

    @pytest.mark.parametrize("options", [{"window": 100}, {"window": 1024, "softcap": 30.0}, {"softcap": 5.0}], ids=str)
    def test_windows_and_soft_caps(self, kv_dtype: torch.dtype, options: dict[str, float]) -> None:
        self.assert_right(kv_dtype, options=options)

    def test_a_recorded_launch_attends_to_the_lengths_of_its_replay(self, kv_dtype: torch.dtype) -> None:
        """And all of a hundred replays are right: parts are merged by whoever comes last."""
        case = replace(LLAMA, kv_dtype=kv_dtype, seq_lens=(3000, 100, 2500, 64))
        step, out = Step.random(case, torch.device("cuda")), torch.empty(4, 32, 128, dtype=case.dtype, device="cuda")
        workspace = decode_workspace(4, 32, 8, 128, 49, step.q.device)
        inputs = step.q, step.kv_layer, step.page_table, step.seq_lens, out, workspace
        decode_attention(*inputs, scale=0.1, num_splits=49)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode_attention(*inputs, scale=0.1, num_splits=49)
        scaled = replace(case, options={"scale": 0.1})
        for lens in ((3000, 100, 2500, 64), (1, 0, 2499, 33)):
            step.seq_lens.copy_(torch.tensor(lens))
            for _ in range(50):
                out.fill_(float("nan"))
                graph.replay()
                assert_right(scaled, out, step)

    def test_it_may_begin_before_queries_and_newest_keys_are_there(self, kv_dtype: torch.dtype) -> None:
        """What writes them lets it begin at once, and it asks for older keys meanwhile."""
        torch.manual_seed(0)
        dtype = torch.bfloat16 if kv_dtype == FP8 else kv_dtype
        case = replace(LLAMA, kv_dtype=kv_dtype, dtype=dtype, seq_lens=(1000, 1, 64, 0, 2049) * 8)
        step, device = Step.random(case, torch.device("cuda")), torch.device("cuda")
        newest = (step.seq_lens - 1).clamp(min=0).long()
        slots = step.page_table.gather(1, newest[:, None] // case.page_size)[:, 0] * case.page_size
        slots = torch.where(step.seq_lens > 0, slots + newest % case.page_size, -1)
        angles = torch.rand(2100, 64, device=device)
        tables = torch.stack((angles.cos(), angles.sin()), dim=1)
        workspace = decode_workspace(40, 32, 8, 128, 49, device)
        for _ in range(20):
            qkv = torch.randn(40, 48 * 128, device=device).to(dtype)
            q, out = qkv.view(40, 48, 128)[:, :32], torch.empty(40, 32, 128, dtype=dtype, device=device)
            shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
            rope_store(qkv, newest, slots, tables, step.kv_layer, **shape)
            inputs = q, step.kv_layer, step.page_table, step.seq_lens, out, workspace
            decode_attention(*inputs, scale=0.1, num_splits=49)
            assert_right(replace(case, options={"scale": 0.1}), out, replace(step, q=q))


ROWS: Final = {
    "rows in one share": (Case((60, 20, 9), num_splits=1), (3, 1, 4)),
    "rows in several shares, page edges": (Case((500, 17, 66), num_splits=7), (4, 4, 2)),
    "a tile that only the last rows see": (Case((66, 130), num_splits=9), (4, 8)),
    "a padding row": (Case((100, 0, 33), num_splits=3), (5, 1, 2)),
    "no GQA": (Case((140, 70), num_heads=2, num_kv_heads=2), (7, 16)),
    "a group of 3": (Case((150, 70), num_heads=3, num_kv_heads=1, head_dim=80), (6, 2)),
    "a group of 8, heads of 128": (Case((150,), num_heads=8, num_kv_heads=1, head_dim=128), (6,)),
    "window": (Case((200, 70, 64), options={"window": 70}), (4, 3, 5)),
    "window in a tile, many shares": (Case((400, 10), num_splits=9, options={"window": 3}), (4, 4)),
    "chunks": (Case((142, 71, 3), num_splits=5, options={"window": 70, "chunked": True}), (6, 4, 3)),
    "sinks, soft cap": (Case((300, 9), num_splits=5, has_sinks=True, options={"softcap": 2.0}), (4, 3)),
    "FP8": (Case((150, 17), kv_dtype=FP8, options={"k_scale": 0.5, "v_scale": 2.0}), (3, 9)),
    "float32": (Case((90, 20), dtype=torch.float32, kv_dtype=torch.float32, num_splits=4), (4, 2)),
    "more parts than are read at once": (
        Case((2100, 3), num_heads=1, num_kv_heads=1, head_dim=256, num_splits=70, options={"window": 600}),
        (3, 2),
    ),
}


def with_rows(case: Case, row_lens: tuple[int, ...], device: torch.device) -> Step:
    """Return a step in which each request has so many rows, the last of which sees all its tokens."""
    step = Step.random(replace(case, options=None), device)
    owner = torch.repeat_interleave(torch.arange(len(row_lens)), torch.tensor(row_lens))
    behind = torch.cat([torch.arange(count - 1, -1, -1) for count in row_lens])
    q = torch.randn(len(owner), *step.q.shape[1:], device=device, dtype=torch.float32).to(case.dtype)
    seq_lens = (step.seq_lens[owner] - behind.to(device)).to(torch.int32)
    return replace(step, q=q, page_table=step.page_table[owner], seq_lens=seq_lens)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_request_that_share_what_is_read_are_what_the_reference_computes(
    name: str, device: torch.device
) -> None:
    case, row_lens = ROWS[name]
    step, most = with_rows(case, row_lens, device), rows_together(case.num_heads // case.num_kv_heads)
    shape = (len(step.q), case.num_heads, case.num_kv_heads, case.head_dim, case.num_splits)
    groups = row_groups(np.array(row_lens), most)
    on_device = RowGroups(*(torch.from_numpy(each.astype(np.int32)).to(device) for each in groups))
    out = attend(case, step, workspace=decode_workspace(*shape, step.q.device, most), groups=on_device)
    assert_right(case, out, step)
