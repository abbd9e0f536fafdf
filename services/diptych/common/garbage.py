"""Keeps Python's search for cyclic garbage from visiting all objects of a server hundreds of times a second.

Reference counts free what a request leaves; the search is for the few cycles, most of which come from exceptions.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

EVERY: Final = 20_000  # objects more than before: a few MB at most; Python's own choice is 700
THEN: Final = 20  # searches among younger objects for each among older ones


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Do not search while modules are imported: what they make stays, and searches would take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spare_what_stays() -> None:
    """Call it when all is loaded: what is there now is never searched again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(EVERY, THEN, THEN)
