from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.attention.choose_tokens import choose_tokens, reference_choose_tokens
from diptych.kernels.gpu.attention.index_scores import IndexRows

NOTHING: Final = -7


def rows_of(lens: list[int], page_size: int, device: torch.device) -> IndexRows:
    """Return rows that each have their own request, whose pages lie anywhere."""
    width = max(1, -(-max(lens) // page_size))
    table = torch.randperm(len(lens) * width, device=device).view(len(lens), width).to(torch.int32)
    own = torch.arange(len(lens), dtype=torch.int32, device=device).flip(0)
    return IndexRows(table, own, torch.tensor(lens, dtype=torch.int32, device=device))


def chosen_from(scores: Tensor, rows: IndexRows, num_kept: int, page_size: int) -> Tensor:
    chosen = torch.full((len(rows.lens), num_kept), NOTHING, dtype=torch.int32, device=scores.device)
    choose_tokens(scores, rows, chosen, page_size=page_size)
    return chosen


def assert_right(scores: Tensor, rows: IndexRows, num_kept: int, page_size: int) -> None:
    chosen = chosen_from(scores, rows, num_kept, page_size)
    for row, slots in enumerate(reference_choose_tokens(scores, rows, num_kept, page_size)):
        assert chosen[row, : len(slots)].tolist() == slots.tolist(), row
        assert chosen[row, len(slots) :].eq(NOTHING).all()


def some_scores(kind: str, shape: tuple[int, int], device: torch.device) -> Tensor:
    scores = torch.randn(shape, device=device)
    match kind:
        case "all different":
            return scores
        case "many equal":
            return scores.mul(2).round()
        case "both zeros":
            return torch.where(scores > 1.5, scores, torch.where(scores > 0, 0.0, -0.0))
        case "all equal":
            return torch.full(shape, -3.0, device=device)
        case "near each other":
            return 1 + scores * 1e-7
        case "far from each other":
            return scores.sign() * scores.mul(20).exp()
        case _:
            raise ValueError(kind)


KINDS: Final = ("all different", "many equal", "both zeros", "all equal", "near each other", "far from each other")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_kept", [1, 12, 300])
def test_the_best_are_chosen_and_of_equal_ones_the_first(kind: str, num_kept: int, device: torch.device) -> None:
    lens = [num_kept + 1, 500, 4096, 4097, 9001]
    assert_right(some_scores(kind, (5, 9004), device), rows_of(lens, 16, device), num_kept, 16)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_slots_are_those_of_pages_of_any_size(page_size: int, device: torch.device) -> None:
    assert_right(some_scores("many equal", (3, 200), device), rows_of([199, 64, 65], page_size, device), 50, page_size)


def test_rows_that_see_no_more_keep_all_without_a_look_at_scores(device: torch.device) -> None:
    scores = torch.full((5, 40), torch.nan, device=device)
    assert_right(scores, rows_of([0, 1, 19, 20, 5], 16, device), 20, 16)


def test_scores_behind_the_end_of_a_row_are_not_read(device: torch.device) -> None:
    scores = some_scores("many equal", (2, 100), device)
    scores[0, 50:], scores[1, 70:] = torch.inf, torch.inf
    assert_right(scores, rows_of([50, 70], 16, device), 20, 16)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_choose_as_many_that_there_are(number: float, device: torch.device) -> None:
    scores = some_scores("all different", (1, 100), device)
    scores[0, ::3] = number
    rows = rows_of([90], 1, device)
    chosen = chosen_from(scores, rows, 40, 1)[0].tolist()
    positions = [rows.page_table[0].tolist().index(slot) for slot in chosen]
    assert positions == sorted({*positions})
    assert positions[-1] < 90


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.usefixtures("device")
class TestOnGpus:
    pytestmark = on_gpu

    @pytest.mark.parametrize("kind", KINDS)
    def test_long_rows_are_chosen_from_as_by_the_reference(self, kind: str) -> None:
        device = torch.device("cuda")
        scores = some_scores(kind, (6, 131_072), device)
        assert_right(scores, rows_of([131_072, 2049, 2048, 40_000, 0, 100_001], 64, device), 2048, 64)
