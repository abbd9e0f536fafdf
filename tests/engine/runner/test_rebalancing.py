"""Experts that are dealt out anew lie where a model lies that was loaded so, and never twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.checkpoints.quantization.weight import expanded
from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.runner.rebalancing import Rebalancing, SomeTensors
from diptych.engine.values.expert_placement import ExpertPlacement, balanced

NUM_RANKS, NUM_REDUNDANT = 2, 1
LOAD = [1, 1, 90]  # of the three experts: the last one gets a copy


class Dealt:
    """Implements what one rank asks of an `ExpertGroup`, with loads that are told."""

    rank, size = 0, NUM_RANKS

    def __init__(self, load: Sequence[float]) -> None:
        self._first = load
        self.placements: dict[int, ExpertPlacement] = {}

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        if layer not in self.placements:
            self.placements[layer] = balanced(self._first, self.size, NUM_REDUNDANT)
        return self.placements[layer]

    def own(self, layer: int, num_experts: int) -> Sequence[int]:
        return self.placement(layer, num_experts).of_ranks[self.rank]

    def room(self, num_experts: int) -> int:
        return -(-(num_experts + NUM_REDUNDANT) // self.size)

    def peers(self, width: int, experts_per_token: int, room: int) -> None:
        """There is no GPU."""

    def load_of_layers(self) -> dict[int, list[int]]:
        return dict.fromkeys(self.placements, LOAD)


class OneRank:
    """Implements `Communicator` as far as loading asks: alone, but for experts."""

    rank, size, stages = 0, 1, None

    def __init__(self, experts: Dealt) -> None:
        self.experts = experts


def loaded(source: ModelSource, dealt: Dealt, quantization: str = "auto") -> LoadedModel:
    layout = ModelRunner.pool_layout(source.config, num_pages=4, page_size=16, dtype="float32")
    communicator: Any = OneRank(dealt)
    return load_model(
        source, torch.zeros(layout.shape), ModelOptions("float32", quantization=quantization), communicator
    )


def contents(model: LoadedModel) -> list[bytes]:
    return sorted(part.numpy().tobytes() for part in model.memory().parts)


def test_what_moves_is_as_it_would_have_been_loaded_one_layer_after_the_other(
    tiny_experts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dealt, told = open_model(str(tiny_experts_folder)), Dealt([90, 1, 1]), []
    model = loaded(source, dealt)
    wanted = contents(loaded(source, Dealt(LOAD)))
    assert (contents(model) == wanted) is False
    replace = Decoder.replace

    def telling(decoder: Decoder, part: int, weights: Weights) -> None:
        told.append("layer")
        replace(decoder, part, weights)

    monkeypatch.setattr(Decoder, "replace", telling)
    experts: Any = dealt
    rebalancing = Rebalancing(model, source, experts, 2, NUM_REDUNDANT, lambda: told.append("tensor"))
    rebalancing.before_round()
    assert not told
    rebalancing.before_round()
    assert (contents(model) == wanted) is True  # no difference is to be printed
    assert told.count("layer") == 2
    between = told[told.index("layer") : len(told) - told[::-1].index("layer")]
    assert "tensor" in between, "all layers were read before one took the place of the old one"


def test_a_checkpoint_that_lacks_a_tensor_by_then_ends_the_worker_rather_than_compute_by_old_experts(
    tiny_experts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dealt = open_model(str(tiny_experts_folder)), Dealt([90, 1, 1])
    experts: Any = dealt
    rebalancing = Rebalancing(loaded(source, dealt), source, experts, 1, NUM_REDUNDANT)
    tensors = SomeTensors.tensors
    monkeypatch.setattr(SomeTensors, "tensors", lambda self: list(tensors(self))[1:])
    with pytest.raises(ConfigError, match="can't be read any more"):
        rebalancing.before_round()


def test_what_moves_is_expanded_as_the_model_was(tiny_experts_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `--quantization none`: what is stored in fewer bits is to be expanded at each move, too."""
    source, dealt, asked = open_model(str(tiny_experts_folder)), Dealt([90, 1, 1]), []
    model = loaded(source, dealt, "none")

    def telling(tensors: Any) -> Any:
        asked.append(1)
        return expanded(tensors)

    monkeypatch.setattr("diptych.engine.runner.loaded_model.expanded", telling)
    experts: Any = dealt
    Rebalancing(model, source, experts, 1, NUM_REDUNDANT).before_round()
    assert asked
