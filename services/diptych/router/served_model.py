"""The model that a router serves, as far as requests need to know it."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.router.text.parsing.message_formats import DEFAULT_FORMATS, MessageFormats
from diptych.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this router serves."""

    model_id: str
    tokenizer: Tokenizer
    vocab_size: int
    context_len: int  # tokens, prompt + output, that the model takes; workers may take fewer
    formats: MessageFormats = DEFAULT_FORMATS  # in which it writes calls of tools, and reasoning
    names: tuple[str, ...] = ()  # that clients are told in place of its id; answers say the first
