"""Turns the output tokens of requests into text, and ends a request at its first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.detokenizer import Decoder, IncrementalDetokenizer
from diptych.engine.finish import Finish
from diptych.engine.stop import StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a client may see now. `finish` is set with the last delta of a request."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None


class TextStream:
    """One request's text. Tokens after the one that completed a stop string are dropped."""

    def __init__(self, tokenizer: Decoder, stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(stops)

    def push(self, token_ids: Sequence[int], finish: Finish | None) -> TextDelta:
        """Take new tokens, and how the request ended if it did; a stop string may end it earlier."""
        text = ""
        for index, token_id in enumerate(token_ids):
            found = self._stops.push(self._detokenizer.push((token_id,)))
            text += found.text
            if found.stopped:
                return TextDelta(text, tuple(token_ids[: index + 1]), Finish.STOP)
        if finish is None:
            return TextDelta(text, tuple(token_ids), None)
        found = self._stops.push(self._detokenizer.flush())
        text += found.text if found.stopped else found.text + self._stops.flush()
        return TextDelta(text, tuple(token_ids), Finish.STOP if found.stopped else finish)


class DetokenizerManager:
    """Makes a `TextStream` for each request of one model."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def open(self, stops: Sequence[str]) -> TextStream:
        return TextStream(self._tokenizer, stops)
