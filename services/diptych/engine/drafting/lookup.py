"""Looks for the end of one text in another, with numpy: for texts of thousands of tokens, or that are rarely asked."""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych.common.arrays import I64

MAX_MATCH: Final = 8  # tokens
MAX_PLACES: Final = 64  # that are compared: a token may stand everywhere
_BACK: Final = np.arange(1, MAX_MATCH + 1)


def places_behind(text: I64, end: I64, near: int) -> tuple[I64, int]:
    """Return where in `text` the longest part of `end`'s end stands that it has, up to `MAX_MATCH`, and its length.

    A place is the number of the token that follows there, so that there is one. Places around `near` are compared, half
    of them before it and half behind. No places: length 0.
    """
    places: I64 = (text[:-1] == end[-1]).nonzero()[0] + 1
    if not len(places):
        return places, 0
    if len(places) > MAX_PLACES:
        middle = int(np.searchsorted(places, near))
        places = places[max(0, middle - MAX_PLACES // 2) : middle + MAX_PLACES // 2]
    most = min(MAX_MATCH, len(end), len(text))
    back = _BACK[:most]
    is_same = (text[places[:, None] - back] == end[-back]) & (places[:, None] >= back)
    matches = np.logical_and.accumulate(is_same, axis=1).sum(axis=1)
    match = int(matches.max())
    return places[matches == match], match
