"""Which models take rows in place of embeddings."""

from __future__ import annotations

from dataclasses import replace

from tiny_config import tiny_config

from diptych.architectures.config import DraftLayers
from diptych.architectures.pooling import Pooling
from diptych.engine.values.step_rows import row_width


def test_rows_are_as_wide_as_hidden_states_unless_something_needs_the_tokens_themselves() -> None:
    model = tiny_config()
    assert row_width(model) == model.hidden_size
    assert row_width(replace(model, per_layer_dim=4)) == 0
    assert row_width(replace(model, draft=DraftLayers(model, 1))) == 0
    assert row_width(replace(model, pooling=Pooling("embed", "last"))) == 0
