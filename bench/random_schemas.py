"""Random JSON schemas whose values all end: for tests and measurements of structured output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

Schema = dict[str, Any]

NAMES: Final = ("name", "age", "id", "tags", "kind", "x y", "größe", 'a"b', "street", "value", "$ref")
CONSTANTS: Final = ("a", "b c", '"q"', "é", "tab\t", "", 1, -7, 2.5, None, True, False, [1, [2]], {"k": "v", "l": []})
PATTERNS: Final = (
    r"^[a-z]{1,5}$",
    r"^\d{3}-\d{4}$",
    r"^(foo|bar)_[A-F0-9]{2,4}$",
    r'^[^"\\]{0,3}$',
    r"^é?ü{1,2}$",
)
FORMATS: Final = ("date", "date-time", "uuid", "ipv4")


def random_schema(rng: Random, depth: int = 3) -> Schema:
    """Return a schema of at most `depth` levels of nesting."""
    return _Maker(rng).root(depth)


class _Maker:
    """Makes one schema and collects its definitions."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Schema] = {}

    def root(self, depth: int) -> Schema:
        schema = self._any(depth)
        return {"$defs": self._definitions, **schema} if self._definitions else schema

    def _any(self, depth: int) -> Schema:
        if depth == 0 or self._rng.random() < 0.3:
            return self._one_of(self._string, self._number, self._constant, self._simple)
        makers = (self._object, self._object, self._map, self._array, self._tuple, self._any_of, self._all_of)
        return self._one_of(*[lambda make=make: make(depth - 1) for make in (*makers, self._reference, self._tree)])

    def _one_of(self, *makers: Callable[[], Schema]) -> Schema:
        return self._rng.choice(makers)()

    def _string(self) -> Schema:
        min_len = self._rng.randrange(4)
        return self._rng.choice(
            [
                {"type": "string", "minLength": min_len, "maxLength": min_len + self._rng.randrange(6)},
                {"type": "string", "pattern": self._rng.choice(PATTERNS)},
                {"type": "string", "format": self._rng.choice(FORMATS)},
            ]
        )

    def _number(self) -> Schema:
        low, width = self._rng.randrange(-1000, 1000), self._rng.randrange(2, 5000)
        return self._rng.choice(
            [
                {"type": "integer", "minimum": low, "maximum": low + width},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + width},
                {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 7 + width},
                {"type": "number", "minimum": low / 8, "maximum": (low + width) / 8},
                {"type": ["integer", "null"], "minimum": low, "maximum": low + width},
            ]
        )

    def _constant(self) -> Schema:
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(CONSTANTS)}
        return {"enum": self._rng.sample(CONSTANTS, self._rng.randrange(1, 5))}

    def _simple(self) -> Schema:
        return {"type": self._rng.choice(["boolean", "null"])}

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randrange(5))
        return {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": self._some(names),
            "additionalProperties": False,
        }

    def _map(self, depth: int) -> Schema:
        values = {"^[xy]{1,3}$": self._any(depth), "^z[0-9]$": self._any(depth)}
        return {"type": "object", "patternProperties": values, "additionalProperties": False, "maxProperties": 3}

    def _array(self, depth: int) -> Schema:
        min_items = self._rng.randrange(3)
        max_items = min_items + self._rng.randrange(3)
        return {"type": "array", "items": self._any(depth), "minItems": min_items, "maxItems": max_items}

    def _tuple(self, depth: int) -> Schema:
        items = [self._any(depth) for _ in range(self._rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _all_of(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, 2)
        closed: Schema = {"type": "object", "properties": dict.fromkeys(names, True), "additionalProperties": False}
        parts = [{"properties": {name: self._any(depth)}, "required": [name]} for name in names]
        return {**closed, "allOf": parts}

    def _reference(self, depth: int) -> Schema:
        return {"$ref": self._define(self._any(depth))}

    def _tree(self, depth: int) -> Schema:
        """A schema that holds itself."""
        name = f"#/$defs/d{len(self._definitions)}"
        properties = {"leaf": self._simple(), "child": {"$ref": name}}
        tree = {"type": "object", "properties": properties, "required": ["leaf"], "additionalProperties": False}
        return {"$ref": self._define(tree)}

    def _define(self, schema: Schema) -> str:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = schema
        return f"#/$defs/{name}"

    def _some(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._rng.random() < 0.6]
