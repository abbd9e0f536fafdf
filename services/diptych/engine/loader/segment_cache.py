"""Remembers the tokens of pieces of text: the last used ones, within a bound in bytes. Safe between threads."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

ENTRY_BYTES: Final = 200  # beside text and tokens: the dictionary's place, the objects' heads
MAX_SHARE: Final = 4  # a piece may fill one part in so many: a single prompt must not push out all others


class SegmentCache:
    """Text -> its tokens, as bytes. The text itself is the key: no two texts are ever taken for one another."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tokens: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self.num_bytes = 0
        self.known_chars = 0  # of the texts that were put together: from here
        self.new_chars = 0  # likewise, and not from here

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, segments: Sequence[str]) -> list[bytes | None]:
        """Return the tokens of each segment, None of one that is not known."""
        with self._lock:
            return [self._touch(segment) for segment in segments]

    def add(self, tokens: Mapping[str, bytes]) -> None:
        with self._lock:
            for segment, ids in tokens.items():
                size = _size(segment, ids)
                if segment not in self._tokens and size <= self._max_bytes // MAX_SHARE:
                    self._tokens[segment] = ids
                    self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._tokens.popitem(last=False))

    def count(self, known_chars: int, new_chars: int) -> None:
        """Note of what a text was put together."""
        with self._lock:
            self.known_chars += known_chars
            self.new_chars += new_chars

    def _touch(self, segment: str) -> bytes | None:
        tokens = self._tokens.get(segment)
        if tokens is not None:
            self._tokens.move_to_end(segment)
        return tokens


def _size(segment: str, tokens: bytes) -> int:
    return ENTRY_BYTES + sys.getsizeof(segment) + len(tokens)
