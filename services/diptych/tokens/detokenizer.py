"""Decides which text of a growing list of tokens is certain, so that it can be shown at once and never taken back.

A token can end within a character: the decoder then writes U+FFFD, and the text after the last whole character waits.
Only a short window of tokens is decoded: the tokens not shown yet, behind those shown last, which some decoders need as
context (a leading space is kept in the middle of a text but not at its start).

Tokens of byte-level vocabularies are runs of bytes, and each stands alone. A character that one leaves unfinished waits
for the next one; what can't become a character is shown as U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"
_MAX_UNFINISHED: Final = 3  # a character has at most 4 bytes, each a token at least: 3 can wait for the last
_MAX_WINDOW: Final = 16  # tokens


class Decoder(Protocol):
    """A tokenizer; `tokenizers.Tokenizer` is one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens, without special tokens."""
        ...


class Detokenizer(Protocol):
    """Turns the tokens of one request into text: joined, what its methods return is the decoding of all of them."""

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that they make certain."""
        ...

    def flush(self) -> str:
        """Return the text that was waiting: no more tokens come."""
        ...


class ByteDetokenizer:
    """The one of byte-level vocabularies."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[token_id] for token_id in ids]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class IncrementalDetokenizer:
    """The one of all other vocabularies, at a constant cost a token.

    What it returns is the decoding of all tokens. One exception, of tokenizers with byte fallback: they decode a run of
    byte tokens as broken if any byte of it is, whatever was already shown of the run.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0  # tokens at the front of the window that are shown
        self._shown = ""  # of the window's text

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(token) for token in ids])

    def flush(self) -> str:
        text = self._tokenizer.decode(self._window)[len(self._shown) :]
        self._start_window([], 0, "")
        return text

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode_window()
        num_waiting = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_UNFINISHED)
        certain = text[len(self._shown) : len(text) - num_waiting]
        self._shown += certain
        if not certain:
            self._drop_invisible(token)
        elif num_waiting == 0:
            self._make_context()
        elif len(self._window) > _MAX_WINDOW:
            certain += self._cut_window(text)
        return certain

    def _decode_window(self) -> str:
        text = self._tokenizer.decode(self._window)
        if self._num_context and not text.startswith(self._shown):
            # Byte fallback: an unfinished character breaks the whole ones before it, until it is finished.
            self._start_window(self._window[self._num_context :], 0, "")
            text = self._tokenizer.decode(self._window)
        return text

    def _make_context(self) -> None:
        """All is shown: what was new is the context of what comes."""
        new = self._window[self._num_context :]
        self._start_window(new, len(new), self._tokenizer.decode(new))

    def _drop_invisible(self, token: int) -> None:
        """Forget a token without text, or a long run of special tokens would fill the window.

        Twice, because a single token may have no text only for being the first: decoders strip one leading space.
        """
        if not self._tokenizer.decode([token, token]):
            self._window.pop()

    def _cut_window(self, text: str) -> str:
        """Shorten a window full of broken characters; return the text that this makes certain.

        Where both parts decode to the same text as the whole, no character spans the cut. Nor will one later: the last
        token has text, so what the first part left unfinished is known to be broken.
        """
        for num_kept in range(1, _MAX_UNFINISHED + 2):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text, tail_text = self._tokenizer.decode(head), self._tokenizer.decode(tail)
            if head_text + tail_text == text:
                certain = head_text[len(self._shown) :]
                self._start_window(tail, 0, self._shown[len(head_text) :])
                return certain
        return ""

    def _start_window(self, ids: list[int], num_context: int, shown: str) -> None:
        self._window, self._num_context, self._shown = ids, num_context, shown
