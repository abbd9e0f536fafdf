"""What a GPU's loader counts with before it has graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.engine import EngineOptions
from diptych.engine.runner.model_loader import ModelLoader


@pytest.mark.parametrize(
    ("experts", "graphs", "records"),
    [(None, "on", True), (None, "off", False), (0, "on", False), (64, "on", True), (64, "off", False)],
)
def test_no_memory_is_kept_for_graphs_where_experts_are_exchanged_so_that_none_can_be_recorded(
    experts: int | None, graphs: Any, records: bool
) -> None:
    shared = None if experts is None else SimpleNamespace(most_recorded=experts)
    communicator: Any = SimpleNamespace(experts=shared)
    loader = ModelLoader(EngineOptions(device="cuda", cuda_graphs=graphs), torch.device("cuda"), communicator)
    assert loader._records_steps is records
