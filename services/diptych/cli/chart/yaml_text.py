"""Writes plain values as YAML that people like to read: block style, quotes only where they are needed. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

Value = Mapping[str, "Value"] | Sequence["Value"] | str | int | float | bool  # a Sequence that is no str

PLAIN: Final = re.compile(r"[A-Za-z_/][\w./-]*")  # and no other word of YAML, such as "no"
WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def yaml_text(value: Mapping[str, Value]) -> str:
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Value) -> Iterator[str]:
    """Yield the lines of a map or list that is not empty."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _entry(f"{_scalar(name)}:", each)
    elif isinstance(value, Sequence):
        for each in value:
            first, *others = [_scalar(each)] if _is_scalar(each) else _lines(each)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)


def _entry(name: str, value: Value) -> Iterator[str]:
    if _is_scalar(value):
        yield f"{name} {_scalar(value)}"
        return
    yield name
    yield from (f"  {line}" for line in _lines(value))


def _is_scalar(value: Value) -> bool:
    return isinstance(value, str) or not isinstance(value, Mapping | Sequence) or not value


def _scalar(value: Value) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return "{}" if isinstance(value, Mapping) else "[]"
    return json.dumps(value)
