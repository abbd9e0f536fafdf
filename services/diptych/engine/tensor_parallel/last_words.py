"""What a scheduler process says of why it ends. Where another one of its group ended first, that end says more."""

from __future__ import annotations

from typing import Final

LOST: Final = "its connection to another process of the group has ended"
_LIBRARIES: Final = ("gloo/", "NCCL")  # that carry what processes add up; they have no exceptions of their own for it
_SIGNS: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "remote process exited",
)


def last_words(error: Exception) -> str:
    """Return `LOST` where a library has noticed before others that a process is gone: its own words are for the log."""
    words = str(error)
    is_lost = isinstance(error, RuntimeError) and any(each in words for each in _LIBRARIES)
    return LOST if is_lost and any(sign in words for sign in _SIGNS) else f"{type(error).__name__}: {words}"
