from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.attention.decode_attention import FP8
from diptych.kernels.gpu.attention.index_scores import (
    IndexRows,
    IndexShape,
    index_programs,
    index_scores,
    reference_index_scores,
)

NUM_KEPT: Final = 20


@dataclass(frozen=True, slots=True)
class Case:
    """Rows, each of which sees so many tokens of a request."""

    lens: tuple[int, ...]
    requests: tuple[int, ...] | None = None  # None: each row has its own
    num_heads: int = 6
    head_dim: int = 32
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype = torch.float16
    num_programs: int = 3

    @property
    def shape(self) -> IndexShape:
        return IndexShape(self.num_heads, self.head_dim, NUM_KEPT, self.page_size, self.dtype, self.kv_dtype)


class Step:
    """Its tensors: the middle layer of three; what no request has is NaN, and pages lie anywhere."""

    def __init__(self, case: Case, device: torch.device) -> None:
        requests = case.requests or tuple(range(len(case.lens)))
        seq_lens = [max(row for row, own in zip(case.lens, requests, strict=True) if own == r) for r in {*requests}]
        counts = [-(-seq_len // case.page_size) for seq_len in seq_lens]
        num_pages = sum(counts) + 2
        keys = torch.randn(num_pages, 3, 1, case.page_size, 1, case.head_dim, device=device).to(case.kv_dtype)
        holes = keys.view(torch.uint8).view(num_pages, 3, case.page_size, -1)  # torch indexes no FP8
        order = torch.randperm(num_pages, device=device)
        holes[order[sum(counts) :]] = 0xFF
        table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32, device=device)
        first = 0
        for request, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
            table[request, :count] = order[first : first + count]
            if count:
                holes[order[first + count - 1], :, seq_len - (count - 1) * case.page_size :] = 0xFF
            first += count
        own, lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in (requests, case.lens))
        self.rows = IndexRows(table, own, lens)
        self.index = torch.randn(len(case.lens), case.shape.size + 6, device=device).to(case.dtype)[:, :-6]
        self.keys_layer = keys[:, 1]


def scores_of(case: Case, step: Step, rows: slice = slice(None)) -> Tensor:
    """Return `[num_rows, max_len]`; -1 where nothing is written."""
    part = step.rows.part(rows)
    scores = torch.full((len(part.lens) + 1, max(case.lens) + 3), -1.0, device=step.index.device)
    arguments = step.index[rows], step.keys_layer, part, scores, case.shape
    index_scores(*arguments, num_programs=case.num_programs)
    assert scores[-1].eq(-1).all()
    return scores[:-1]


SMALL: Final = {
    "page and tile edges": Case((21, 63, 64, 65, 95, 128)),
    "one long row in many shares": Case((500,), num_programs=7),
    "more programs than tiles": Case((70, 30), num_programs=9),
    "one program": Case((100, 21), num_programs=1),
    "rows of a prompt": Case((38, 39, 40, 41, 90), requests=(0, 0, 0, 0, 1)),
    "many heads": Case((90, 25), num_heads=40),
    "float32, odd sizes": Case((90, 25), num_heads=5, head_dim=22, dtype=torch.float32, kv_dtype=torch.float32),
    "pages that tiles do not divide": Case((130, 99), page_size=20),
    "one token a page": Case((70,), page_size=1),
    "FP8": Case((150, 27), kv_dtype=FP8),
}


def assert_right(case: Case, step: Step, scores: Tensor) -> None:
    tolerance = 1e-4 if case.dtype == torch.float32 else 1e-3  # products of two-byte numbers are summed up in float32
    for row, exact in enumerate(reference_index_scores(step.index, step.keys_layer, step.rows, case.shape)):
        seen = len(exact) if len(exact) > NUM_KEPT else 0
        torch.testing.assert_close(scores[row, :seen].double(), exact[:seen], atol=tolerance * 10, rtol=tolerance)
        assert scores[row, seen:].eq(-1).all()


@pytest.mark.parametrize("name", SMALL)
def test_scores_are_what_the_reference_computes_in_float64(name: str, device: torch.device) -> None:
    case = SMALL[name]
    step = Step(case, device)
    assert_right(case, step, scores_of(case, step))


def test_rows_that_attend_to_all_and_rows_of_padding_are_skipped(device: torch.device) -> None:
    case = Case((0, NUM_KEPT, NUM_KEPT + 1, 7))
    step = Step(case, device)
    scores = scores_of(case, step)
    assert scores[[0, 1, 3]].eq(-1).all()
    assert_right(case, step, scores)


@pytest.mark.parametrize("num_programs", [1, 2, 5])
def test_a_row_has_the_same_bits_in_any_batch_and_any_share(device: torch.device, num_programs: int) -> None:
    case = Case((150, 64, 22, 99, 70), requests=(0, 1, 1, 2, 0))
    step = Step(case, device)
    together = scores_of(case, step)
    alone: Sequence[Tensor] = [
        scores_of(replace(case, num_programs=num_programs), step, slice(row, row + 1))[0] for row in range(5)
    ]
    assert torch.equal(torch.stack(list(alone)), together)


def test_there_are_as_many_programs_as_run_at_once_but_no_more_than_tiles() -> None:
    assert index_programs(64, 131_072, 132) == 396
    assert index_programs(1, 128, 132) == 2


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LARGE: Final = {
    "DeepSeek V3.2, a batch": Case((4096, 21, 1000, 30_001, 65), num_heads=64, num_programs=396),
    "GLM 5, a prompt": Case((4094, 4095, 4096), requests=(0, 0, 0), num_heads=32, num_programs=396),
}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.usefixtures("device")
class TestOnGpus:
    pytestmark = on_gpu

    def test_large_shapes_are_what_the_reference_computes(self, name: str, kv_dtype: torch.dtype) -> None:
        case = replace(LARGE[name], head_dim=128, page_size=64, dtype=torch.bfloat16, kv_dtype=kv_dtype)
        step = Step(case, torch.device("cuda"))
        assert_right(case, step, scores_of(case, step))
