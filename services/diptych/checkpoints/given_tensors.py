"""Tensors that somebody gives for a model that is served: in safetensors files, under their names in its checkpoint.

A trainer writes them to shared memory (`/dev/shm`) and says where; nothing is copied until it is laid out. The name of
the weights that come of it covers samples of every tensor, so that two workers that were given the same have one name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.safetensors import DERIVED, FLOATS, read_tensors, tensor_names
from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.checkpoints.quantization.weight import Stored
    from diptych.checkpoints.source import ModelSource
    from diptych.kernels.quantized import Array
    from diptych.tokens.tokenizer import Tokenizer

NUM_SAMPLES: Final = 64  # of a tensor
SAMPLE_BYTES: Final = 256


class GivenTensors:
    """A `ModelSource` with tensors that were given for the model that `base` is; all or some of them."""

    def __init__(self, base: ModelSource, files: Sequence[Path], named: Iterable[tuple[str, Array]] = ()) -> None:
        """`named`: further ones, in memory. Raises `ConfigError` for files that are not safetensors."""
        self._base = base
        self.config = base.config
        self.weights_id = base.weights_id  # until somebody counts what is here: see `digests`
        self.weight_files: Sequence[Path] = ()
        self._files = files
        self._named = tuple(named)
        self.names = _names(files) | {name for name, _ in self._named}

    def tokenizer(self) -> Tokenizer:
        return self._base.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """Yield what belongs into the model, as its checkpoints have it. Raises `ConfigError`."""
        from diptych.architectures.registry import FAMILIES

        unstack = FAMILIES[self.config.architecture].unstack
        not_read = FAMILIES[self.config.architecture].not_read(self.config)
        derived = (*DERIVED, "lm_head.weight") if self.config.tie_embeddings else DERIVED
        for name, array in self._all():
            if name.startswith(not_read) or name.endswith(derived):
                continue
            if array.dtype.type not in FLOATS.values():
                raise ConfigError(f"{name} is of {array.dtype}: only float32, float16 and bfloat16 are taken")
            yield from unstack(self.config, (name, array))

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self.tensors()

    def units(self) -> Units:
        return apart

    def next_layer(self) -> NoReturn:
        raise ConfigError(f"tensors that were given for {self.config.model_id} are none of a next layer")

    def digests(self) -> dict[str, str]:
        """Return a name for the content of each tensor."""
        return {name: _digest(array) for name, array in self._all()}

    def _all(self) -> Iterator[tuple[str, Array]]:
        for file in self._files:
            yield from read_tensors(file)
        yield from self._named


class RenamedWeights:
    """A `ModelSource` of weights that are in no files any more: only what they are is known."""

    def __init__(self, base: ModelSource, weights_id: str) -> None:
        self._base = base
        self.config = base.config
        self.weights_id = weights_id
        self.weight_files: Sequence[Path] = ()

    def tokenizer(self) -> Tokenizer:
        return self._base.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        raise ConfigError(f"the weights of {self.config.model_id} came as tensors: they are in no file")

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        return self.tensors()

    def units(self) -> Units:
        return apart

    def next_layer(self) -> NoReturn:
        raise ConfigError(f"the weights of {self.config.model_id} came as tensors: they are in no file")


def weights_id_of(digests: dict[str, str], base: str) -> str:
    """Return the name of weights; `base`: of those that were not given, "" if all were."""
    return hashlib.sha256(repr((base, sorted(digests.items()))).encode()).hexdigest()[:32]


def _names(files: Sequence[Path]) -> set[str]:
    try:
        return {name for file in files for name in tensor_names(file)}
    except OSError as error:
        raise ConfigError(f"the tensors can't be read: {error}") from None


def _digest(array: Array) -> str:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    digest = hashlib.sha256(repr((array.dtype.str, array.shape)).encode())
    for sample in range(NUM_SAMPLES):
        start = sample * max(0, len(data) - SAMPLE_BYTES) // (NUM_SAMPLES - 1)
        digest.update(data[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:32]
