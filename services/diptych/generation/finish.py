"""Names how a request ended."""

from __future__ import annotations

import enum


class Finish(enum.Enum):
    """Why no more tokens come."""

    __hash__ = object.__hash__  # as it is compared: Enum's own is Python

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # `max_tokens`, or the context is full
    ABORTED = "abort"  # the client left, or a worker failed
