"""Looks for the end of one text in another, with numpy: for texts of thousands of tokens, or that are rarely asked."""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych.common.arrays import I64

MAX_MATCH: Final = 8  # tokens


def places_behind(text: I64, end: I64) -> tuple[I64, int]:
    """Return where in `text` the longest part of `end`'s end stands that it has, up to `MAX_MATCH`, and its length.

    A place is the number of the token that follows there, so that there is one. No places: length 0.
    """
    places: I64 = np.flatnonzero(text[:-1] == end[-1]) + 1
    if not len(places):
        return places, 0
    for match in range(2, min(MAX_MATCH, len(end)) + 1):
        longer = places[places >= match]
        longer = longer[text[longer - match] == end[-match]]
        if not len(longer):
            return places, match - 1
        places = longer
    return places, min(MAX_MATCH, len(end))
