"""The grammar of calls that must be made, from the schemas that clients give."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.errors import InvalidRequest
from diptych.grammars import source
from diptych.router.text.parsing.tool_use import ONE_LINE, Choice, Function, choose

NAMES: dict[str, Any] = {"X": {"type": "string"}}
REF = {"$ref": "#/$defs/X"}


def schema_of(parameters: dict[str, Any], choice: Choice) -> Any:
    grammar = choose([Function("f", parameters)], choice, parallel=True).grammar()
    assert grammar is not None
    source.check(grammar)
    return json.loads(grammar.text)


@pytest.mark.parametrize("name", ["default", "enum", "const", "examples", "properties", "$ref"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    forced = schema_of({"properties": {name: REF}, "$defs": NAMES}, "required")
    assert forced["$defs"]["f"]["properties"] == {name: {"$ref": "#/$defs/f/$defs/X"}}


def test_what_looks_like_a_reference_in_data_is_none() -> None:
    parameters = {"properties": {"a": {"enum": [REF], "default": REF}, "b": {"anyOf": [REF]}}, "$defs": NAMES}
    properties = schema_of(parameters, "required")["$defs"]["f"]["properties"]
    assert properties == {"a": {"enum": [REF], "default": REF}, "b": {"anyOf": [{"$ref": "#/$defs/f/$defs/X"}]}}
    assert parameters["properties"]["b"] == {"anyOf": [REF]}


def test_options_of_the_grammar_are_not_for_clients() -> None:
    assert schema_of({"x-guidance": {"lenient": True}}, "named") == {"type": "object", "x-guidance": ONE_LINE}


@pytest.mark.parametrize("choice", ["named", "required"])
@pytest.mark.parametrize("kind", ["string", None, ["object", "null"]])
def test_arguments_that_must_be_given_are_an_object(choice: Choice, kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="'f' must be of type 'object'"):
        choose([Function("f", {"type": kind})], choice, parallel=True)
