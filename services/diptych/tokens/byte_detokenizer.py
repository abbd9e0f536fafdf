"""The text of a growing list of tokens that are runs of bytes (byte-level vocabularies): each stands alone.

A character that a token leaves unfinished waits for the next one; what can't become a character is shown as U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

_UTF8 = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """Turns the tokens of one request into text: joined, what `push` and `flush` return is the decoding of all."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._decoder = _UTF8("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that they make certain."""
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[token_id] for token_id in ids]))

    def flush(self) -> str:
        """Return the text that was waiting: no more tokens come."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
