"""Which models take rows in place of embeddings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from tiny_config import tiny_config

from diptych.architectures.config import DraftLayers
from diptych.architectures.pooling import Pooling
from diptych.engine.values.step_rows import row_limit, row_width


def test_rows_are_as_wide_as_hidden_states_unless_something_needs_the_tokens_themselves() -> None:
    model = tiny_config()
    assert row_width(model) == model.hidden_size
    assert row_width(replace(model, per_layer_dim=4)) == 0
    assert row_width(replace(model, draft=DraftLayers(model, 1))) == 0
    assert row_width(replace(model, pooling=Pooling("embed", "last"))) == 0


def test_numbers_of_rows_are_within_what_the_type_of_the_model_holds_multiplied_where_rows_are() -> None:
    model = replace(tiny_config(), embedding_scale=12.0)
    for dtype in ("float32", "bfloat16", "float16"):
        most = row_limit(model, dtype)
        assert most == torch.finfo(getattr(torch, dtype)).max
        assert torch.tensor(np.float32(most)).to(getattr(torch, dtype)).isfinite()
        assert row_limit(replace(model, scales_given_rows=True), dtype) == most / 12
