"""Decides which text of a growing list of tokens is certain, so that it can be shown at once and never taken back.

A token can end within a character: the decoder then writes U+FFFD, and the text after the last whole character waits.
Only a short window of tokens is decoded: the tokens not shown yet, behind those shown last, which some decoders need as
context (a leading space is kept in the middle of a text but not at its start).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"
_MAX_UNFINISHED: Final = (
    3  # a character has at most 4 bytes: 3 tokens, or replacement characters, may wait for the last
)
_MAX_WINDOW: Final = 32  # tokens, unless more come at once


class Decoder(Protocol):
    """A tokenizer; `tokenizers.Tokenizer` is one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens, without special tokens."""
        ...


class IncrementalDetokenizer:
    """Turns the tokens of one request into text, at a constant cost a token.

    What `push` and `flush` return, joined, is the decoding of all tokens. One exception, of tokenizers with byte
    fallback: they decode a run of byte tokens as broken if any byte of it is, whatever was already shown of the run.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0  # tokens at the front of the window that are shown
        self._num_shown = 0  # characters of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that they make certain."""
        num_before = len(self._window)
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window)
        num_waiting = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_UNFINISHED)
        shown = text[self._num_shown : len(text) - num_waiting]
        self._num_shown += len(shown)
        if not shown:
            self._drop_invisible(num_before)
        elif num_waiting == 0:
            self._move_window()
        elif len(self._window) > _MAX_WINDOW:
            shown += self._cut_window(text)
        return shown

    def flush(self) -> str:
        """Return the text that was waiting: no more tokens come."""
        text = self._tokenizer.decode(self._window)[self._num_shown :]
        self._window, self._num_context, self._num_shown = [], 0, 0
        return text

    def _move_window(self) -> None:
        """All is shown: what was new is the context of what comes."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_shown = len(self._tokenizer.decode(self._window))

    def _drop_invisible(self, start: int) -> None:
        """Forget new tokens without text, or a long run of special tokens would fill the window.

        Twice, because a single token may have no text only for being the first: decoders strip one leading space.
        """
        self._window[start:] = [token for token in self._window[start:] if self._tokenizer.decode([token, token])]

    def _cut_window(self, text: str) -> str:
        """Shorten a window full of broken characters; return the text that this makes certain.

        Where both parts decode to the same text as the whole, no character spans the cut. Nor will one later: the
        second part is not empty, so what the first part left unfinished is known to be broken.
        """
        for num_kept in range(1, _MAX_UNFINISHED + 2):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text, tail_text = self._tokenizer.decode(head), self._tokenizer.decode(tail)
            if tail_text and head_text + tail_text == text:
                shown = head_text[self._num_shown :]
                self._window, self._num_context = tail, 0
                self._num_shown = max(0, self._num_shown - len(head_text))
                return shown
        return ""
