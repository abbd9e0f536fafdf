"""A model without weights: a `config.json` and random numbers, to measure speed and to try a configuration.

Equal on every machine: prefill and decode workers compute the same nonsense.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers

from diptych.architectures.config import ModelConfig
from diptych.architectures.next_layer import next_layer, placement_of
from diptych.checkpoints.hf_folder import read_config
from diptych.checkpoints.quantization.units import Units, apart
from diptych.kernels.quantized import Array
from diptych.tokens.hf_tokenizer import read_tokenizer
from diptych.tokens.tokenizer import Tokenizer

NUM_RANDOM: Final = 1_000_003  # numbers that all weights repeat: fresh ones for billions would take minutes
SCALE: Final = 0.02


class DummyModel:
    """A `ModelSource` over a folder that has a `config.json`, and a `tokenizer.json` or not."""

    def __init__(self, folder: Path, config: ModelConfig | None = None) -> None:
        """`config`: of the folder's model, or of a part of it; None: of all."""
        self._folder = folder
        self.config = config or read_config(folder)
        self.weights_id = hashlib.sha256(b"dummy" + (folder / "config.json").read_bytes()).hexdigest()[:32]
        self.weight_files: Sequence[Path] = ()

    def tokenizer(self) -> Tokenizer:
        if (self._folder / "tokenizer.json").exists():
            return read_tokenizer(self._folder, self.config.eos_ids)
        return Tokenizer(_numbers(self.config.vocab_size), eos_ids=self.config.eos_ids, chat_template=None)

    def next_layer(self) -> DummyModel:
        return DummyModel(self._folder, next_layer(self.config))

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Views of the same memory, which must not be written to: weights of billions cost no time."""
        placed = list(placement_of(self.config)(self.config))
        shapes = [(sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]) for _, pieces in placed]
        random = SCALE * np.random.default_rng(0).standard_normal(NUM_RANDOM, dtype=np.float32)
        repeated = np.resize(random, NUM_RANDOM + max(map(math.prod, shapes)))
        start = 0
        for (name, _), shape in zip(placed, shapes, strict=True):
            if len(shape) == 1:
                yield name, np.full(shape, 0.0 if name.endswith(".bias") else 1.0 - self.config.norm_offset, np.float32)
            else:
                size = math.prod(shape)
                start = (start + size) % NUM_RANDOM  # no two matrices of a layer begin alike
                yield name, repeated[start : start + size].reshape(shape)

    def blanks(self) -> Iterator[tuple[str, Array]]:
        """In float32, as made-up weights are."""
        for name, pieces in placement_of(self.config)(self.config):
            yield name, np.broadcast_to(np.float32(0), (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]))

    def units(self) -> Units:
        return apart


def _numbers(vocab_size: int) -> tokenizers.Tokenizer:
    """A token is its number, written out: "5 17 300"."""
    vocab = {str(token_id): token_id for token_id in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return backend
