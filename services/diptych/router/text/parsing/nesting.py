"""Finds where a value in quotes or brackets ends, without caring whether it is valid."""

from __future__ import annotations


class Nesting:
    """Looks at a text that begins with a quote or a bracket, piece by piece. Any bracket closes any other."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._quote = ""  # the one that is open
        self._depth = 0
        self._is_escaped = False

    def find_end(self, text: str) -> int | None:
        """Return the place after the value's last character, if that is in this piece."""
        for at, char in enumerate(text):
            self._pass(char)
            if not self._depth and not self._quote:
                return at + 1
        return None

    def _pass(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in self._quotes:
            self._quote = char
        else:
            self._depth += (char in "{[(") - (char in "}])")
