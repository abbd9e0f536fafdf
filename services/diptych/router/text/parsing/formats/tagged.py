"""Arguments that a model writes one by one as text between tags: each becomes JSON as its schema says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.tool_use import Function
from diptych.router.text.parsing.writer import Writer

_WORDS: Final = {"True": "true", "False": "false", "None": "null"}  # as Python spells them


class TaggedArguments:
    """Writes the arguments of one call."""

    def __init__(self, function: Function, writer: Writer) -> None:
        properties = function.parameters.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        self._write = writer.arguments
        self._opening = "{"
        self._is_cut = False

    def read(self, reader: Reader, name: str, closing: Sequence[str]) -> Reading[None]:
        """Read one value, up to and with its closing tag. Text is passed on as it comes."""
        self._write(f"{self._opening}{_quoted(name)}: ")
        self._opening = ", "
        kinds = _kinds(self._properties.get(name))
        if kinds == ("string",):
            self._write('"')
            mark = yield from reader.until(closing, lambda text: self._write(_quoted(text)[1:-1]))
            ending = '"'
        else:
            pieces: list[str] = []
            mark = yield from reader.until(closing, pieces.append)
            ending = _value("".join(pieces).strip(), kinds)
        self._is_cut = not mark
        if mark:
            self._write(ending)

    def end(self) -> None:
        """There are no more. Arguments that were cut off stay open, so that nobody takes them for complete."""
        if not self._is_cut:
            self._write("{}" if self._opening == "{" else "}")


def _kinds(schema: object) -> tuple[str, ...]:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return (kind,) if isinstance(kind, str) else tuple(kind) if isinstance(kind, list) else ()


def _value(text: str, kinds: Sequence[str]) -> str:
    """Return it as JSON: what it reads as, unless the schema allows text and not that."""
    try:
        value = json.loads(text)
        is_welcome = not kinds or "string" not in kinds or _kind(value) in kinds
        return json.dumps(value if is_welcome else text, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return _WORDS.get(text) or _quoted(text)


def _kind(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
