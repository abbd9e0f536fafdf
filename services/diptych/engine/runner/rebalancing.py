"""Deals experts out to ranks anew, by the work that was counted, between two rounds of schedulers that share them.

All ranks do so before the same round: they add up what each has counted, and the placement follows from the sum alone.
A layer whose experts move is read from the checkpoint again, in each rank's part, and takes the place of the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final

import torch

from diptych.architectures.placement import Piece
from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import ChangedModel, ModelSource
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.matrices.weights import Assembly, Weights
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.tensor_parallel.sharing.expert_group import ExpertGroup
from diptych.engine.values.expert_placement import ExpertPlacement, balanced

logger = logging.getLogger(__name__)

ENOUGH: Final = 0.95  # of the heaviest rank's work: experts move only for less


class Rebalancing:
    """One rank takes part in it."""

    def __init__(
        self, model: LoadedModel, source: ModelSource, experts: ExpertGroup, every: int, num_redundant: int
    ) -> None:
        """`every`: so many rounds; 0: never."""
        self._model = model
        self._source = source
        self._experts = experts
        self._every = every
        self._num_redundant = num_redundant
        self._num_rounds = 0

    def before_round(self) -> None:
        """Call it before each round, on all ranks."""
        self._num_rounds += 1
        if self._every and self._num_rounds % self._every == 0:
            self._deal()

    def _deal(self) -> None:
        moved = {}
        for layer, load in self._experts.load_of_layers().items():
            old = self._experts.placements[layer]
            new = balanced(load, self._experts.size, self._num_redundant)
            if max(new.work(load)) < ENOUGH * max(old.work(load)):
                moved[layer] = new
        if moved:
            logger.info("experts of %d layers move to other ranks", len(moved))
            self._move(moved)

    def _move(self, moved: Mapping[int, ExpertPlacement]) -> None:
        self._experts.placements.update(moved)
        model, decoder = self._model, self._model.decoder
        assert isinstance(decoder, Decoder), "encoders share no experts"
        placement = ModelPart.of(self._source, model.communicator).placement
        wanted = [(name, pieces) for name, pieces in placement if _layer_of(pieces) in moved]
        read = SomeTensors(self._source, {name for name, _ in wanted})
        blueprint = model.blueprint
        assembly = Assembly(model.config, wanted, blueprint.ops, blueprint.dtype, blueprint.device)
        with torch.inference_mode():
            found = Weights({}, blueprint.vectors, model.config.norm_offset)
            for name, array in ModelPart.of(read, model.communicator).tensors:
                for target, weight in assembly.add(name, array):
                    found.put(target, weight)
            for layer in moved:
                decoder.replace(1 + layer, found.wrapped(model.loras.wrap))


class SomeTensors(ChangedModel):
    """A model of which only what is named is read."""

    def __init__(self, source: ModelSource, names: Container[str]) -> None:
        super().__init__(source, source.config)
        self._names = names

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        return (each for each in self._source.tensors() if each[0] in self._names)


def _layer_of(pieces: Iterable[Piece]) -> int | None:
    first = next(iter(pieces)).target.partition(".")[0]
    return int(first) if first.isdecimal() else None
