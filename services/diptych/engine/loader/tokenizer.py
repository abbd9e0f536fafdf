"""Text to token ids and back, and chat messages to text. Safe to share between threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tokenizers

from diptych.common.errors import InvalidRequest
from diptych.engine.loader.chat_template import ChatTemplate, Message
from diptych.engine.loader.token_bytes import TokenBytes


class Tokenizer:
    """A model's tokenizer. Special tokens written out in a text become their single ids, as a chat prompt needs."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_ids: Sequence[int], chat_template: ChatTemplate | None
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.token_bytes = TokenBytes(backend)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return token ids. `add_special_tokens` puts the model's BOS in front, where the model has that habit."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:  # a lone surrogate has no UTF-8 form
            raise InvalidRequest(f"text is not valid Unicode: {error}") from None
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return text; bytes that are not (yet) UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """Return what `tokenizer.json` would hold."""
        return self._backend.to_str()

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt for `messages`; encode it without `add_special_tokens`, it carries its own."""
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template: use completions with a plain prompt")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
