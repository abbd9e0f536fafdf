"""A model whose context the operator bounds: less than it could take, for all that is sized by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError
from diptych.tokens.tokenizer import Tokenizer


class BoundedModel:
    """A `ModelSource` with a shorter context than that of another one."""

    def __init__(self, source: ModelSource, context_len: int) -> None:
        self._source = source
        self.config = replace(source.config, context_len=context_len)
        self.weights_id = source.weights_id

    def tokenizer(self) -> Tokenizer:
        return self._source.tokenizer()

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        return self._source.tensors()


def bounded(source: ModelSource, max_model_len: int) -> ModelSource:
    """Return the model with at most `max_model_len` tokens of context; 0: as it is.

    Raises `ConfigError` for more than it can take.
    """
    if not max_model_len:
        return source
    own = source.config.context_len
    if max_model_len > own:
        words = f"--max-model-len {max_model_len} is more than the {own} tokens that {source.config.model_id} takes"
        raise ConfigError(f"{words}: lower it, or leave it out")
    return BoundedModel(source, max_model_len)
