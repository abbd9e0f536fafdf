"""Log-probabilities of an answer's text as it grows. Pure.

Rule: a token's stands beside the text that it begins. It waits while that text is held back, and is never told where
there is none, as at the end of sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from diptych.router.http.fields.logprobs import chat_logprobs, text_of
from diptych.router.output import Scores
from diptych.tokens.token_bytes import TokenBytes

Json = dict[str, Any]


class TextScores:
    """Those of one answer."""

    def __init__(self, token_bytes: TokenBytes | None) -> None:
        self._token_bytes = token_bytes  # None: none are wanted
        self._num_chars = 0
        self._waiting: list[tuple[int, Json]] = []  # with the place where the token begins
        self.told: list[Json] = []

    def push(self, text: str, scores: Scores | None) -> list[Json]:
        """Take new text and the tokens that came with it; return what stands beside the text."""
        if self._token_bytes is None:
            return []
        if scores is not None:
            content = chat_logprobs(scores, self._token_bytes, partial(text_of, token_bytes=self._token_bytes))[
                "content"
            ]
            self._waiting += zip(scores.offsets, content, strict=True)
        self._num_chars += len(text)
        told = [entry for place, entry in self._waiting if place < self._num_chars]
        del self._waiting[: len(told)]
        self.told += told
        return told
