"""The bytes that a token stands for: a token may hold part of a character only, which has no text of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

import tokenizers

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte fallback of sentence-piece vocabularies
_SPACE_PIECE: Final = "\u2581"


class TokenBytes:
    """Looks up tokens of one vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = backend.decoder
        self._backend = backend
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token as they stand within a text; none for an id outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str = self._backend.id_to_token(token_id) or ""
        if self._is_byte_level:
            return bytes([_BYTES[char] for char in piece if char in _BYTES])
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE_PIECE, " ").encode()


class TextBytes(dict[int, bytes]):
    """What each token adds to a decoded text, of a byte-level vocabulary. Fills itself as tokens are asked for.

    As the decoder has it: special tokens and unknown ids add nothing; a piece with a character that stands for no byte,
    which only added tokens have, stands for itself. Special tokens that are `shown` do so, too.
    """

    def __init__(self, backend: tokenizers.Tokenizer, shown: Collection[str] = ()) -> None:
        super().__init__()
        added = backend.get_added_tokens_decoder().items()
        self._backend = backend
        self._special = {token_id for token_id, token in added if token.special and token.content not in shown}

    def __missing__(self, token_id: int) -> bytes:
        piece: str = "" if token_id in self._special else self._backend.id_to_token(token_id) or ""
        is_bytes = all(char in _BYTES for char in piece)
        self[token_id] = found = bytes([_BYTES[char] for char in piece]) if is_bytes else piece.encode()
        return found


def byte_alphabet() -> Mapping[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others are moved up behind them, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(moved)}


_BYTES: Final = byte_alphabet()
