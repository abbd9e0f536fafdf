"""Presents the folder of an EAGLE-3 head as a `ModelSource`: see `architectures.eagle`.

All that the header of its files tells is checked when it is opened, before a weight is read; of its tensors only the
numbers of its tokens are read then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from diptych.architectures.config import ModelConfig
from diptych.architectures.eagle import WORDS, own_name, placement_of, read_head
from diptych.checkpoints.fingerprint import fingerprint
from diptych.checkpoints.hf_folder import shards_of
from diptych.checkpoints.quantization.units import Units, apart
from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.safetensors import FLOATS, read_blanks, read_header, read_tensors
from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError
from diptych.common.json_file import read_json
from diptych.kernels.quantized import Array
from diptych.tokens.tokenizer import Tokenizer

Read = Callable[[Path], Iterator[tuple[str, Array]]]  # all tensors of a file
DERIVED: Final = ("t2d", "midlayer.self_attn.rotary_emb.inv_freq")  # from d2t, and from the configuration


class EagleFolder:
    """A `ModelSource` that guesses for another one, and has its embedding and output projection where it lacks them."""

    def __init__(self, folder: Path, model: ModelSource) -> None:
        """Raises `ConfigError` for a head that is not one of `model`."""
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--speculate eagle: {str(folder)!r} is no folder of a head: it lacks config.json")
        values, config_bytes = read_json(folder / "config.json"), (folder / "config.json").read_bytes()
        if values.get("quantization_config"):
            raise ConfigError(f"--speculate eagle: {folder.name} is quantised, and heads are read as they were trained")
        self._model = model
        self._shards = shards_of(folder)
        blanks = dict(self._read_all(read_blanks))
        self.config = read_head(values, blanks, model.config, folder.resolve().name)
        _check_tensors(self.config, blanks)
        self._words = self._read_words()
        self.weight_files: Sequence[Path] = self._shards
        header = config_bytes + b"".join(read_header(shard)[0] for shard in self._shards)
        self.weights_id = fingerprint(self._shards, header)

    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer()

    def next_layer(self) -> NoReturn:
        raise ConfigError(f"--speculate mtp: {self.config.model_id} has no layer that predicts one token more")

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        for name, tensor in self._read_all(read_tensors):
            yield name, self._words if name == WORDS and self._words is not None else tensor

    def blanks(self) -> Iterator[tuple[str, Stored]]:
        for name, tensor in self._read_all(read_blanks):
            yield name, np.zeros(tensor.shape, np.float32) if name == WORDS else tensor

    def units(self) -> Units:
        return apart

    def _read_all(self, read: Read) -> Iterator[tuple[str, Array]]:
        for shard in self._shards:
            for stored, tensor in read(shard):
                if (name := own_name(stored)) not in DERIVED:
                    yield name, tensor

    def _read_words(self) -> Array | None:
        """Return the tokens that it says, float32 `[num_words]`, which holds them exactly; None: all of the model's."""
        if self.config.eagle is None or not self.config.eagle.has_words:
            return None
        differences = next(tensor for name, tensor in self._read_all(read_tensors) if name == WORDS)
        words = np.arange(len(differences)) + differences.astype(np.int64)
        if not (words.min() >= 0 and words.max() < self.config.vocab_size):
            span = f"{words.min()} to {words.max()}, and the model has {self.config.vocab_size}"
            raise ConfigError(f"{self.config.model_id}: by {WORDS} it says tokens from {span}")
        return words.astype(np.float32)


def _check_tensors(config: ModelConfig, blanks: Mapping[str, Array]) -> None:
    """Raise `ConfigError` for tensors that are missing, unknown, of another shape or type."""
    expected = {
        name: (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]) for name, pieces in placement_of(config)
    }
    if missing := sorted(expected.keys() - blanks.keys()):
        raise ConfigError(f"{config.model_id}: the checkpoint lacks {', '.join(missing[:5])}")
    if unknown := sorted(blanks.keys() - expected.keys()):
        raise ConfigError(f"{config.model_id}: tensor {unknown[0]!r} has no place in an EAGLE-3 head")
    for name, shape in expected.items():
        found = blanks[name]
        if found.shape != shape:
            raise ConfigError(f"{config.model_id}: {name} is {found.shape}, the configuration says {shape}")
        kinds = (np.int64, np.int32) if name == WORDS else tuple(FLOATS.values())
        if found.dtype.type not in kinds:
            raise ConfigError(f"{config.model_id}: {name} is of {found.dtype}, which a head does not have")
