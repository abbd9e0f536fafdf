"""Calls that a model writes as tags, one for the function and one for each argument, whose values are text.

Each value becomes JSON as its schema says, or as its tag says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.router.text.parsing.calls import after, begin_call, collected, read_marked, then
from diptych.router.text.parsing.reader import Reader, Reading
from diptych.router.text.parsing.tool_use import Function
from diptych.router.text.parsing.writer import Writer

_WORDS: Final = {"True": "true", "False": "false", "None": "null"}  # as Python spells them
_STRING: Final = {'string="true"': ("string",), 'string="false"': ()}  # what it may say of the value's type


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a family. Those of functions and parameters go on with a name, in quotes or not, and end with `>`."""

    begin: str  # in front of calls
    end: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    padding: str = "\n"  # that may stand on each side of a value, and is no part of it

    def read(self, reader: Reader, writer: Writer) -> Reading[None]:
        """Read a message with such calls; the tag in front of them may be forgotten."""
        calls = then(self._call, self.end)
        yield from read_marked(reader, writer, {self.begin: after(self.function, calls), self.function: calls})

    def _call(self, reader: Reader, writer: Writer) -> Reading[None]:
        name, _ = yield from _opening(reader)
        function = begin_call(reader, writer, name)
        arguments = TaggedArguments(function, writer)
        yield from reader.skip_blanks()
        while (yield from reader.consume(self.parameter)):
            yield from self._argument(reader, arguments)
            yield from reader.skip_blanks()
        arguments.end()
        yield from reader.consume(self.function_end)

    def _argument(self, reader: Reader, arguments: TaggedArguments) -> Reading[None]:
        name, attributes = yield from _opening(reader)
        if self.padding:
            yield from reader.consume(self.padding)
        ends = dict.fromkeys((self.padding + self.parameter_end, self.parameter_end))
        yield from arguments.read(reader, name, tuple(ends), _STRING.get(attributes))


def _opening(reader: Reader) -> Reading[tuple[str, str]]:
    """Read the rest of an opening tag; return the name, and the attributes behind one in quotes."""
    text = yield from collected(reader, lambda source, sink: source.until((">",), sink))
    text = text.strip()
    if not text.startswith('"'):
        return text, ""
    name, _, attributes = text[1:].partition('"')
    return name, attributes.strip()


class TaggedArguments:
    """Writes the arguments of one call."""

    def __init__(self, function: Function, writer: Writer) -> None:
        properties = function.parameters.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        self._write = writer.arguments
        self._opening = "{"
        self._is_cut = False

    def read(
        self, reader: Reader, name: str, closing: Sequence[str], kinds: Sequence[str] | None = None
    ) -> Reading[None]:
        """Read one value, up to and with its closing tag. Text is passed on as it comes.

        `kinds`: its types, if they are not those of the schema.
        """
        self._write(f"{self._opening}{quoted(name)}: ")
        self._opening = ", "
        kinds = _kinds(self._properties.get(name)) if kinds is None else kinds
        if kinds == ("string",):
            self._write('"')
            mark = yield from reader.until(closing, lambda text: self._write(quoted(text)[1:-1]))
            ending = '"'
        else:
            pieces: list[str] = []
            mark = yield from reader.until(closing, pieces.append)
            ending = json_of("".join(pieces).strip(), kinds)
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


def json_of(text: str, kinds: Sequence[str] = ()) -> str:
    """Return a value as JSON: what it reads as, unless the schema allows text and not that."""
    try:
        value = json.loads(text)
        is_welcome = not kinds or "string" not in kinds or _kind(value) in kinds
        return json.dumps(value if is_welcome else text, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return _WORDS.get(text) or quoted(text)


def _kind(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
