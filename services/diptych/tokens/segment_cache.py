"""Remembers the tokens of pieces of text: the last used ones, within a bound in bytes. Safe between threads.

Rule: a piece is found only in the namespace that it was put into, so that nobody learns by the time that it takes what
others have asked.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

ENTRY_BYTES: Final = 256  # beside text and tokens: the dictionary's place, the objects' heads
MAX_SHARE: Final = 4  # a piece may fill one part in so many: a single prompt must not push out all others
Key = tuple[bytes, str]  # namespace, text


class SegmentCache:
    """Text -> its tokens, as bytes. The text itself is the key: no two texts are ever taken for one another."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tokens: OrderedDict[Key, bytes] = OrderedDict()  # least recently used first
        self.num_bytes = 0
        self.known_chars = 0  # of the texts that were put together: from here
        self.new_chars = 0  # likewise, and not from here

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, segments: Sequence[str], namespace: bytes = b"") -> list[bytes | None]:
        """Return the tokens of each segment, None of one that is not known."""
        with self._lock:
            return [self._touch((namespace, segment)) for segment in segments]

    def add(self, tokens: Mapping[str, bytes], namespace: bytes = b"") -> None:
        with self._lock:
            for segment, ids in tokens.items():
                key = namespace, segment
                size = _size(key, ids)
                if key not in self._tokens and size <= self._max_bytes // MAX_SHARE:
                    self._tokens[key] = ids
                    self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(*self._tokens.popitem(last=False))

    def count(self, known_chars: int, new_chars: int) -> None:
        """Note of what a text was put together."""
        with self._lock:
            self.known_chars += known_chars
            self.new_chars += new_chars

    def _touch(self, key: Key) -> bytes | None:
        tokens = self._tokens.get(key)
        if tokens is not None:
            self._tokens.move_to_end(key)
        return tokens


def _size(key: Key, tokens: bytes) -> int:
    return ENTRY_BYTES + sum(map(sys.getsizeof, key)) + len(tokens)
