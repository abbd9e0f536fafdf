"""Guesses that a request goes on as it did where its last tokens stood before: prompt lookup, which keeps nothing.

Source: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych.engine.drafting.lookup import places_behind
from diptych.engine.drafting.source import NO_GUESS, Guess, going_on
from diptych.engine.values.request import Request

MIN_MATCH: Final = 2  # tokens
WINDOW: Final = 4096  # newest tokens that are looked at: the time to look grows with them


class NgramSource:
    """Implements `DraftSource`."""

    nbytes = 0

    def guess(self, request: Request, at_most: int) -> Guess:
        text = request.tokens[max(0, request.num_tokens - WINDOW) : request.num_tokens]
        places, match = places_behind(text, text, len(text))
        if match < MIN_MATCH:
            return NO_GUESS
        repeated = text[places[-1] :]  # to its end, and from there once more
        token_ids = np.resize(repeated, at_most).tolist() if len(repeated) < at_most else repeated[:at_most].tolist()
        return going_on(_tokens_only(token_ids), match)

    def end(self, request: Request) -> None:
        pass


def _tokens_only(token_ids: list[int]) -> list[int]:
    """Cut off a guess at content, which stands as numbers below zero."""
    return next((token_ids[:at] for at, token in enumerate(token_ids) if token < 0), token_ids)
