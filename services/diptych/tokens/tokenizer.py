"""Text to token ids and back, and chat messages to text. Safe to share between threads."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from diptych.common.errors import InvalidRequest
from diptych.tokens.byte_detokenizer import ByteDetokenizer
from diptych.tokens.chat_template import ChatTemplate, Message
from diptych.tokens.cut_points import cut_points
from diptych.tokens.detokenizer import Detokenizer, IncrementalDetokenizer
from diptych.tokens.showing_tokenizer import ShowingTokenizer
from diptych.tokens.token_bytes import TextBytes, TokenBytes
from diptych.tokens.token_length import TokenLength, token_length


def stay_in_the_callers_thread() -> None:
    """Keep the library from threads of its own, one a core: who calls it says how many threads tokenise."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A model's tokenizer. Special tokens written out in a text become their single ids, as a chat prompt needs."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        chat_template: ChatTemplate | None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`special_tokens` are what a template may name: bos_token, eos_token, ..."""
        self._backend = backend
        self._special_tokens = special_tokens
        self.chat_template = chat_template
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.token_bytes = TokenBytes(backend)
        self._text_bytes = TextBytes(backend) if isinstance(backend.decoder, ByteLevel) else None

    @property
    def special_tokens(self) -> frozenset[str]:
        """Those that have no text unless they are shown."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return token ids. `add_special_tokens` puts the model's BOS in front, where the model has that habit."""
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Return the token ids of each text. Other threads run meanwhile: the library's `encode` would stop them."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:  # a lone surrogate has no UTF-8 form
            raise InvalidRequest(f"text is not valid Unicode: {error}") from None
        return [encoding.ids for encoding in encodings]

    def cut_points(self) -> re.Pattern[str] | None:
        """Return what matches the tokens before which a text may be cut without a change of its tokens."""
        return cut_points(self._backend)

    def token_length(self) -> TokenLength | None:
        """Return what a text's length tells of the number of its tokens; None: nothing."""
        return token_length(self._backend)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return text; bytes that are not (yet) UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self) -> Detokenizer:
        """Return what makes text of one request's tokens as they come."""
        return IncrementalDetokenizer(self) if self._text_bytes is None else ByteDetokenizer(self._text_bytes)

    def showing(self, tokens: Collection[str]) -> Tokenizer | ShowingTokenizer:
        """Return what decodes these tokens as the texts that they are, should they be special."""
        added = self._backend.get_added_tokens_decoder().values()
        if not any(token.special and token.content in tokens for token in added):
            return self
        return ShowingTokenizer(self._backend, tokens, self.eos_ids)

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return the same with another template. Raises `ConfigError` where it does not compile."""
        other = copy.copy(self)
        other.chat_template = ChatTemplate(source, self._special_tokens)
        return other

    def to_json(self) -> str:
        """Return what `tokenizer.json` would hold."""
        return self._backend.to_str()

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        parameters: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt for `messages`; encode it without `add_special_tokens`, it carries its own."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template: use completions with a plain prompt")
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, parameters=parameters
        )
