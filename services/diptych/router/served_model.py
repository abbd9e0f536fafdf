"""The model that a router serves, as far as requests need to know it."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.loader.tokenizer import Tokenizer
from diptych.router.parsing.message_formats import DEFAULT_FORMATS, MessageFormats


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this router serves."""

    model_id: str
    tokenizer: Tokenizer
    vocab_size: int
    context_len: int  # tokens, prompt + output, that the model takes; workers may take fewer
    formats: MessageFormats = DEFAULT_FORMATS  # in which it writes calls of tools, and reasoning
