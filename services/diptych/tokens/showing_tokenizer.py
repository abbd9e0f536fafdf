"""Decodes some special tokens as the texts that they are, for who must see them: the marks of calls and reasoning."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tokenizers
from tokenizers.decoders import ByteLevel

from diptych.tokens.byte_detokenizer import ByteDetokenizer
from diptych.tokens.detokenizer import Detokenizer, IncrementalDetokenizer
from diptych.tokens.token_bytes import TextBytes


class ShowingTokenizer:
    """A tokenizer as far as output needs one. Special tokens that are not to be shown have no text, as ever."""

    def __init__(self, backend: tokenizers.Tokenizer, shown: Collection[str], eos_ids: tuple[int, ...]) -> None:
        added = backend.get_added_tokens_decoder().items()
        self._backend = backend
        self._hidden = frozenset(key for key, token in added if token.special and token.content not in shown)
        self._text_bytes = TextBytes(backend, shown) if isinstance(backend.decoder, ByteLevel) else None
        self.eos_ids = eos_ids

    def decode(self, ids: Iterable[int]) -> str:
        shown = [token_id for token_id in ids if token_id not in self._hidden]
        text: str = self._backend.decode(shown, skip_special_tokens=False)
        return text

    def detokenizer(self) -> Detokenizer:
        """Return a new one, for one request."""
        return IncrementalDetokenizer(self) if self._text_bytes is None else ByteDetokenizer(self._text_bytes)
