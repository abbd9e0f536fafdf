"""Gives a loaded model other weights part by part, so that at no time two sets of them are in memory.

A part is what is before and behind the layers, or one layer. It is made anew when all that it is made of has come, and
the old one is dropped: beside the model lie a part or two, and one tensor of a checkpoint. No step may run meanwhile,
and between the first tensor and `settle` the model is neither the old nor the new one.

Checkpoints need not be sorted, and not everything need come: what `settle` finds of a part without its vectors (norms,
biases) gets those that it had, unless they are of a change that never ended. A part that lacks a matrix can't be made,
nor can a matrix of which a piece has come without the rest: the tensors that it waits for are named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from diptych.checkpoints.quantization.weight import Stored
from diptych.common.errors import ConfigError
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.runner.loaded_model import LoadedModel, as_kept


class PartsInPlace:
    """One change of one model. `take` may be called many times."""

    def __init__(self, model: LoadedModel) -> None:
        """Raises `ConfigError` for a model that makes vectors: its head is no part."""
        if model.pooler is not None or not isinstance(model.decoder, Decoder):
            raise ConfigError("weights of a model that makes vectors can't be replaced in place: restart it")
        self._model = model
        self._decoder = model.decoder
        self._vectors = model.blueprint.vectors
        self._assembly = model.blueprint.assembly(model.config)
        self._matrices: dict[str, Matrix] = {}  # that have come, and that a part waits for
        self._come: set[str] = set()  # names of matrices and vectors
        self._made_of = [frozenset(names) for names in model.decoder.made_of]
        self._waiting: dict[int, None] = {}  # parts of which something has come, in order
        self._may_keep = True  # vectors of the model are all of one set
        self._parts_of: defaultdict[str, list[int]] = defaultdict(list)
        for part, names in enumerate(self._made_of):
            for name in names:
                self._parts_of[name].append(part)

    def release(self) -> None:
        """Free the memory of all weights but vectors: all matrices are to come."""
        self._decoder.release()
        if self._model.images is not None:
            self._model.images.forget()
        self._waiting = dict.fromkeys(range(len(self._made_of)))

    def want_all(self) -> None:
        """Wait for vectors, too: those that the model has are of several sets."""
        self._may_keep = False

    def take(self, tensors: Iterable[tuple[str, Stored]]) -> None:
        """Take tensors, cut to this rank's part, by their names in checkpoints. Raises `ConfigError`."""
        with torch.inference_mode():
            for name, array in as_kept(tensors, self._model.options):
                self._begin(self._assembly.targets_of(name))
                for target, weight in self._assembly.add(name, array):
                    self._put(target, weight)
                    if target == "embed" and self._model.config.tie_embeddings:
                        self._put("lm_head", weight)

    def lacking(self) -> list[str]:
        """Return the tensors that parts wait for, as checkpoints name them, in the order of their names."""
        if not self._may_keep:
            return self._assembly.lacking
        wanted = {name for part in self._waiting for name in self._matrix_names(part) - self._come}
        return self._assembly.tensors_of(wanted | self._assembly.begun)

    def settle(self) -> None:
        """Make the parts that lack only vectors. Nothing else may be lacking."""
        with torch.inference_mode():
            for part in list(self._waiting):
                self._make(part)

    def _begin(self, targets: Iterable[str]) -> None:
        """Have the parts wait that are made of these."""
        for name in targets:
            self._waiting |= dict.fromkeys(self._parts_of[name])
            if name == "embed" and self._model.config.tie_embeddings:
                self._begin(["lm_head"])

    def _put(self, name: str, weight: Matrix | torch.Tensor) -> None:
        self._come.add(name)
        if isinstance(weight, torch.Tensor):
            self._vectors[name] = weight
            self._fill_sinks(name, weight)
        else:
            self._matrices[name] = weight
        for part in list(self._parts_of[name]):
            if self._made_of[part] <= self._come:
                self._make(part)

    def _make(self, part: int) -> None:
        own = {name: self._matrices[name] for name in self._matrix_names(part)}
        weights = Weights(own, self._vectors, self._model.config.norm_offset)
        self._decoder.replace(part, weights.wrapped(self._model.loras.wrap))
        del self._waiting[part]
        for name in own:
            self._parts_of[name].remove(part)
            if not self._parts_of[name]:
                del self._matrices[name]

    def _matrix_names(self, part: int) -> frozenset[str]:
        return self._made_of[part] - self._vectors.keys()

    def _fill_sinks(self, name: str, weight: torch.Tensor) -> None:
        place = self._model.sink_place(name)
        if place is not None:
            place.copy_(weight)
