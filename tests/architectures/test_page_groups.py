"""Which layers share pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_config import tiny_config

from diptych.architectures.config import Latent, Rope, WideHeads
from diptych.architectures.recurrent import Recurrent, ShortConv
from diptych.engine.values.kv_regions import window_pages
from diptych.engine.values.window_pages import NO_WINDOWS

GEMMA = tiny_config(num_layers=13, windows=(8, 8, 8, 8, 8, 0) * 2 + (8,))
GPT_OSS = tiny_config(num_layers=4, windows=(8, 0, 8, 0))
WIDE: dict[str, Any] = {"wide": WideHeads(32, 1, 1, 2), "rope": Rope(1e4, 32), "local_rope": Rope(1e4, 16)}
NOT_ELIGIBLE: dict[str, dict[str, Any]] = {
    "no windows": {"windows": ()},
    "windows nowhere": {"windows": (0,) * 4},
    "chunks of two sizes": {"windows": (8, 16, 8, 0), "chunked": True},
    "more layers that see all": {"windows": (8, 0, 0, 0)},
    "layers that keep all": {"keeps_all": True},
    "latents": {"num_kv_heads": 1, "latent": Latent(0, 32, 24, 16, 20, interleaved=True, norm_eps=1e-6)},
    "layers with heads so wide that the others take less": WIDE | {"wide": WideHeads(64, 1, 1, 2)},
    "layers that borrow those of windows of two sizes": WIDE | {"windows": (8, 4, 0, 8), "num_borrowing": 1},
    "recurrent layers": {"recurrent": Recurrent((0,), ShortConv(32, 3))},
    "layers that borrow": {"num_borrowing": 1},
    "layers without attention": {"ffn_only": frozenset({0})},
    "layers without a network": {"without_ffn": frozenset({0})},
}


def test_layers_with_windows_are_in_groups_no_larger_than_that_of_the_layers_that_see_all() -> None:
    assert GEMMA.page_groups == ((5, 11), (0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (12,))
    assert GPT_OSS.page_groups == ((1, 3), (0, 2))


def test_where_all_layers_have_windows_the_first_ones_stand_for_those_that_see_all() -> None:
    few, many = (tiny_config(num_layers=number, windows=(8,) * number) for number in (4, 19))
    assert few.page_groups == ((0,), (1,), (2,), (3,))
    assert many.page_groups == ((0, 1), *((first, first + 1) for first in range(2, 18, 2)), (18,))


def test_layers_with_windows_of_one_size_share_pages_where_there_are_others() -> None:
    assert replace(GEMMA, windows=(4, 8, 8, 4, 4, 0) * 2 + (8,)).page_groups == (
        *((5, 11), (0, 3), (4, 6), (9, 10)),
        *((1, 2), (7, 8), (12,)),
    )


def test_a_group_has_as_many_layers_as_take_no_more_than_those_that_see_all() -> None:
    model = replace(GPT_OSS, num_layers=7, windows=(8, 8, 8, 0, 8, 8, 0), **WIDE)
    assert model.page_groups == ((3, 6), (0, 1), (2, 4), (5,))
    assert replace(model, wide=WideHeads(16, 1, 1, 2)).page_groups == ((3, 6), (0,), (1,), (2,), (4,), (5,))
    assert replace(model, wide=WideHeads(40, 1, 1, 2)).page_groups == ((3, 6), (0, 1), (2, 4), (5,))


@pytest.mark.parametrize("change", NOT_ELIGIBLE.values(), ids=NOT_ELIGIBLE)
def test_any_other_model_has_one_group_and_no_pages_of_windows(change: dict[str, Any]) -> None:
    model = replace(GPT_OSS, **change)
    assert model.page_groups == (model.attention_layers,)
    assert window_pages(model, 8) == NO_WINDOWS
