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
NOT_ELIGIBLE: dict[str, dict[str, Any]] = {
    "no windows": {"windows": ()},
    "windows everywhere": {"windows": (8,) * 4},
    "windows nowhere": {"windows": (0,) * 4},
    "windows of two sizes": {"windows": (8, 16, 8, 0)},
    "more layers that see all": {"windows": (8, 0, 0, 0)},
    "layers that keep all": {"keeps_all": True},
    "latents": {"num_kv_heads": 1, "latent": Latent(0, 32, 24, 16, 20, interleaved=True, norm_eps=1e-6)},
    "wide heads": {"wide": WideHeads(32, 1, 1), "rope": Rope(1e4, 32), "local_rope": Rope(1e4, 16)},
    "recurrent layers": {"recurrent": Recurrent((0,), ShortConv(32, 3))},
    "layers that borrow": {"num_borrowing": 1},
    "layers without attention": {"ffn_only": frozenset({0})},
    "layers without a network": {"without_ffn": frozenset({0})},
}


def test_layers_with_windows_are_in_groups_no_larger_than_that_of_the_layers_that_see_all() -> None:
    assert GEMMA.page_groups == ((5, 11), (0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (12,))
    assert GPT_OSS.page_groups == ((1, 3), (0, 2))


@pytest.mark.parametrize("change", NOT_ELIGIBLE.values(), ids=NOT_ELIGIBLE)
def test_any_other_model_has_one_group_and_no_pages_of_windows(change: dict[str, Any]) -> None:
    model = replace(GPT_OSS, **change)
    assert model.page_groups == (model.attention_layers,)
    assert window_pages(model, 8) == NO_WINDOWS
