"""Turns the log lines of many processes into one view for people: time, component, level, message, fields.

Components log JSON lines; other lines (a traceback, a warning of a library) are shown unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TextIO

from diptych.common.logging import LEVEL_COLOURS, RESET

_TAG_COLOURS: Final = ("\x1b[36m", "\x1b[35m", "\x1b[32m", "\x1b[34m", "\x1b[96m", "\x1b[95m", "\x1b[92m", "\x1b[94m")
_DIM: Final = "\x1b[2m"
_KNOWN_FIELDS: Final = frozenset({"time", "level", "component", "logger", "message", "error"})


@dataclass(frozen=True, slots=True)
class LogView:
    """Writes to `out`; `names` are the components, in the order of their colours."""

    out: TextIO
    names: tuple[str, ...]
    colour: bool

    def show(self, name: str, line: str) -> None:
        """Show one line that component `name` wrote."""
        fields = _parse(line)
        self._write(name, line if fields is None else self._event(fields))

    def log(self, message: str, *, level: str = "info") -> None:
        """Show a line of our own."""
        self._write("up", self._event({"level": level, "message": message}))

    def _event(self, fields: Mapping[str, object]) -> str:
        level = str(fields.get("level", "info"))
        text = f"{level:<7} {fields.get('message', '')}"
        extra = "".join(f"  {name}={value}" for name, value in fields.items() if name not in _KNOWN_FIELDS)
        error = f"\n{fields['error']}" if "error" in fields else ""
        return f"{self._painted(text, LEVEL_COLOURS.get(level))}{self._painted(extra, _DIM)}{error}"

    def _write(self, name: str, text: str) -> None:
        tag_colour = _TAG_COLOURS[self.names.index(name) % len(_TAG_COLOURS)] if name in self.names else None
        width = max(len(each) for each in (*self.names, "up"))
        tag = self._painted(f"{name:<{width}}", tag_colour)
        moment = self._painted(f"{datetime.now():%H:%M:%S}", _DIM)
        for line in text.splitlines() or [""]:
            self.out.write(f"{moment} {tag} {line}\n")
        self.out.flush()

    def _painted(self, text: str, colour: str | None) -> str:
        return f"{colour}{text}{RESET}" if self.colour and colour and text else text


def _parse(line: str) -> Mapping[str, object] | None:
    """Return the fields of a JSON log line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "message" in fields else None
