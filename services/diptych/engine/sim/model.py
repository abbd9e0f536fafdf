"""A model as a simulation serves it: the real one's configuration and tokenizer, without its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError
from diptych.tokens.tokenizer import Tokenizer


class SimulatedModel:
    """A model as a simulation serves it. Workers that compute it are no peers: their KV is another."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.config = source.config
        self.weights_id = hashlib.sha256(f"simulated {source.weights_id}".encode()).hexdigest()[:32]

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        raise ConfigError("a simulated model has no weights")
