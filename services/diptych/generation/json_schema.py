"""Reads a JSON schema for the compiler, and refuses what llguidance takes without being able to keep it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

# Keywords whose value holds schemas by name, and those whose value is data.
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA: Final = frozenset({"const", "enum", "default", "examples"})


def read(text: str) -> Mapping[str, Any]:
    """Return the schema. Raises `ValueError`, which says what is wrong with it."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, not {text[:20]}")
    for part in schemas_in(schema):
        _check_counts(part)
    return schema


def _check_counts(schema: Mapping[str, Any]) -> None:
    """The compiler counts keys, also those that repeat, which readers of JSON take for one."""
    least, required = schema.get("minProperties"), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > max(1, len(required)):
        raise ValueError(f"minProperties {least} is not supported with {len(required)} required properties")


def schemas_in(root: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema inside `root`, a schema or a list of schemas. Who gets one may change it."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key not in _DATA:
                    waiting += value.values() if key in _NAMED and isinstance(value, dict) else [value]
