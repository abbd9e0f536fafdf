"""Turns a request's output tokens into the text that its client may see.

Tokens that end the request (end of sequence, stop tokens) have no text. Text that may yet become a stop string, or
the rest of a character, waits; so pieces joined are exactly the text, whatever way the tokens arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.detokenizer import IncrementalDetokenizer
from diptych.engine.loader.tokenizer import Tokenizer
from diptych.engine.sampling_params import SamplingParams
from diptych.engine.stop import StopStrings


class OutputText:
    """The text of one request: `push` its tokens until they end or `is_stopped`, then `flush`."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(params.stop) if params.stop else None
        self._silent = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else tokenizer.eos_ids)
        self.is_stopped = False  # by a stop string: what follows does not count

    def push(self, token_ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Return new text, and those of the tokens that count: up to the one that completed a stop string."""
        if self._stops is None:
            return self._detokenizer.push(self._audible(token_ids)), token_ids
        shown = []
        for count, token_id in enumerate(token_ids, start=1):
            shown.append(self._cut(self._detokenizer.push(self._audible((token_id,)))))
            if self.is_stopped:
                return "".join(shown), token_ids[:count]
        return "".join(shown), token_ids

    def flush(self) -> str:
        """Return the text that was waiting: no more tokens come."""
        if self.is_stopped:
            return ""
        text = self._cut(self._detokenizer.flush())
        return text if self._stops is None or self.is_stopped else text + self._stops.flush()

    def _cut(self, text: str) -> str:
        if self._stops is None:
            return text
        result = self._stops.push(text)
        self.is_stopped = result.stopped
        return result.text

    def _audible(self, token_ids: Sequence[int]) -> Sequence[int]:
        return [token_id for token_id in token_ids if token_id not in self._silent]
