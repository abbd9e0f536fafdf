"""The right answers of a simulated model, for traffic whose every answer is checked."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.checkpoints.simulated import BuiltInModel
from diptych.checkpoints.source import ModelSource
from diptych.engine.sim.answers import expected_tokens, vocabulary_of
from diptych.tokens.chat_template import Message


class KnownAnswers:
    """Knows the answers to greedy requests of the simulation of a model; of the built-in one if none is given."""

    def __init__(self, source: ModelSource | None = None) -> None:
        source = source or BuiltInModel()
        self._tokenizer = source.tokenizer()
        self._vocabulary = vocabulary_of(self._tokenizer, source.config.vocab_size)

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the output tokens, with the one that ends it if it ends by itself."""
        return expected_tokens(prompt, max_tokens, self._vocabulary)

    def num_tokens(self, prompt: str, max_tokens: int) -> int:
        """Return how many tokens the output of a completion has."""
        return len(self.tokens(self._tokenizer.encode(prompt, add_special_tokens=True), max_tokens))

    def completion(self, prompt: str, max_tokens: int) -> str:
        """Return the text of a completion."""
        return self._text(self._tokenizer.encode(prompt, add_special_tokens=True), max_tokens)

    def chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Return the content of a chat completion."""
        return self._text(self._tokenizer.encode(self._tokenizer.apply_chat_template(messages)), max_tokens)

    def _text(self, prompt: Sequence[int], max_tokens: int) -> str:
        return self._tokenizer.decode(self.tokens(prompt, max_tokens))
