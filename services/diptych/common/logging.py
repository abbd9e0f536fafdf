"""Writes one line for each event, as JSON for machines or as text for people, with the request it belongs to.

Modules log through `logging.getLogger(__name__)`; only a process's `main` calls `setup`. Fields that `bind` sets are
added to every line that is logged inside it, across awaits: contextvars carry them.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal, TextIO, get_args

import orjson

from diptych.common.config import option

LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]

LEVELS: Final[tuple[str, ...]] = get_args(LogLevel)
LEVEL_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[1;31m"}
)
RESET: Final = "\x1b[0m"

_CHATTY: Final = ("asyncio", "grpc")  # their debug lines tell nothing about Diptych
_EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
_bound: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("diptych_log_fields", default=_EMPTY)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How a process logs."""

    log_format: LogFormat = option("auto", help="auto is text on a terminal, json elsewhere", group="logging")
    log_level: LogLevel = option("info", help="least severe level that is logged", group="logging")


def setup(component: str, log_format: LogFormat = "auto", level: LogLevel = "info") -> None:
    """Send every logger of this process to stderr, in the given format. Replaces an earlier setup."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(component, log_format, sys.stderr))
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)
    set_level(level)


def set_level(level: str) -> str:
    """Log from one of `LEVELS` on, in the whole process, from now on; return what the level was."""
    root = logging.getLogger()
    previous = logging.getLevelName(root.level).lower()
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
    return previous


@contextlib.contextmanager
def bind(**fields: object) -> Iterator[None]:
    """Add `fields`, such as `request_id` and `room`, to every line logged inside this block."""
    token = _bound.set({**_bound.get(), **{name: str(value) for name, value in fields.items()}})
    try:
        yield
    finally:
        _bound.reset(token)


def colours_wanted(stream: TextIO) -> bool:
    """Say whether `stream` is a terminal that may be coloured; https://no-color.org turns colours off."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, component, logger, message, the bound fields, error."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
            **_bound.get(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS, default=str).decode()


class TextFormatter(logging.Formatter):
    """`12:00:01.123 warning  router  the message  request_id=r-1`, then the traceback, if any."""

    def __init__(self, component: str, *, colour: bool) -> None:
        super().__init__()
        self._component = component
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        moment = datetime.fromtimestamp(record.created)
        fields = "".join(f"  {name}={value}" for name, value in _bound.get().items())
        line = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d} {level:<8} {self._component}  "
        line += record.getMessage() + fields
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if self._colour and level in LEVEL_COLOURS:
            line = f"{LEVEL_COLOURS[level]}{line}{RESET}"
        return line


def _formatter(component: str, log_format: LogFormat, stream: TextIO) -> logging.Formatter:
    if log_format == "json" or (log_format == "auto" and not stream.isatty()):
        return JsonFormatter(component)
    return TextFormatter(component, colour=colours_wanted(stream))
