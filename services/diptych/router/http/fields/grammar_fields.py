"""The fields that say what an output must match: OpenAI's `response_format`, and the names that vLLM gave to others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import MAX_MARK_CHARS, Grammar, GrammarKind
from diptych.router.http.fields.strict_model import GenerationBody, StrictModel


def _parsed(schema: object) -> object:
    """Take a schema written as text too."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None


Schema = Annotated[dict[str, Any], BeforeValidator(_parsed, json_schema_input_type=dict[str, Any] | str)]
Choices = Annotated[list[str], Field(min_length=1)]
MAX_TAGS: Final = 128  # parts of a structural tag, and triggers
FormatKind = Literal["text", "json_object", "json_schema"]


class JsonSchemaFormat(StrictModel):
    """A schema and its name."""

    name: str  # without effect
    json_schema: Schema = Field(alias="schema")
    description: str | None = None  # without effect
    strict: bool | None = None  # without effect: the output always matches


Mark = Annotated[str, Field(min_length=1, max_length=MAX_MARK_CHARS)]


class TaggedPart(StrictModel):
    """A part of an output between its tags."""

    begin: Mark  # with one of the triggers at its beginning
    part_schema: Schema = Field(alias="schema")
    end: Annotated[str, Field(max_length=MAX_MARK_CHARS)]


class StructuralTag(StrictModel):
    """Free text with tagged parts, as in SGLang's and vLLM's APIs."""

    type: Literal["structural_tag"] | None = None
    structures: Annotated[list[TaggedPart], Field(min_length=1, max_length=MAX_TAGS)]
    triggers: Annotated[list[Mark], Field(min_length=1, max_length=MAX_TAGS)]

    def grammar(self) -> Grammar:
        parts = [{"begin": each.begin, "schema": each.part_schema, "end": each.end} for each in self.structures]
        for part in parts:
            if not any(str(part["begin"]).startswith(trigger) for trigger in self.triggers):
                words = f"the beginning {part['begin']!r} of a structure begins with none of the triggers"
                raise InvalidRequest(words, param="structural_tag")
        text = json.dumps({"triggers": self.triggers, "structures": parts}, ensure_ascii=False)
        return Grammar(GrammarKind.STRUCTURAL_TAG, text)


Tagged = Annotated[StructuralTag, BeforeValidator(_parsed, json_schema_input_type=StructuralTag | str)]


def tag_grammar(tag: StructuralTag | None) -> Grammar | None:
    return None if tag is None else tag.grammar()


class ResponseFormat(StrictModel):
    """As in OpenAI's API; `structural_tag` as in SGLang's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[TaggedPart], Field(min_length=1, max_length=MAX_TAGS)] | None = None
    triggers: Annotated[list[Mark], Field(min_length=1, max_length=MAX_TAGS)] | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "structural_tag":
            if self.structures is None or self.triggers is None:
                words = "a response_format of type structural_tag needs structures and triggers"
                raise InvalidRequest(words, param="response_format")
            return StructuralTag(structures=self.structures, triggers=self.triggers).grammar()
        if self.structures is not None or self.triggers is not None:
            words = "structures and triggers belong to a response_format of type structural_tag"
            raise InvalidRequest(words, param="response_format")
        schema = self.json_schema.json_schema if self.json_schema else None
        return grammar_of_format(self.type, schema, "response_format.json_schema")


def grammar_of_format(kind: FormatKind, schema: Mapping[str, Any] | None, param: str) -> Grammar | None:
    """Return what a format of OpenAI's asks for; `param` is where it says its schema. Raises `InvalidRequest`."""
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar.from_schema({"type": "object"})
    if schema is None:
        raise InvalidRequest(f"{param} is required", param=param)
    return _said_as(param, Grammar.from_schema(schema))


class StructuredOutputs(StrictModel):
    """As in vLLM's API: one of these."""

    json_schema: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None
    json_object: bool | None = None
    structural_tag: Tagged | None = None


class GrammarFields(GenerationBody):
    """What an output must match: at most one of these."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Choices | None = None
    json_schema: Schema | None = None  # in SGLang's words, as the next two
    regex: str | None = None
    ebnf: str | None = None

    def grammar(self) -> Grammar | None:
        """Raise `InvalidRequest` if it is said twice."""
        if self.model_fields_set.isdisjoint(_GRAMMARS):
            return None
        given = {name: grammar for name, grammar in self._grammars().items() if grammar is not None}
        if len(given) > 1:
            raise InvalidRequest(f"give only one of {' and '.join(given)}", param=list(given)[1])
        return next((grammar if grammar.said_as else _said_as(name, grammar) for name, grammar in given.items()), None)

    def _grammars(self) -> Mapping[str, Grammar | None]:
        wanted = self.structured_outputs or StructuredOutputs()
        return {
            "response_format": None if self.response_format is None else self.response_format.grammar(),
            "guided_json": json_grammar(self.guided_json),
            "guided_regex": text_grammar(GrammarKind.REGEX, self.guided_regex),
            "guided_grammar": text_grammar(GrammarKind.EBNF, self.guided_grammar),
            "guided_choice": _choice(self.guided_choice),
            "json_schema": json_grammar(self.json_schema),
            "regex": text_grammar(GrammarKind.REGEX, self.regex),
            "ebnf": text_grammar(GrammarKind.EBNF, self.ebnf),
            "structured_outputs.json": json_grammar(wanted.json_schema),
            "structured_outputs.regex": text_grammar(GrammarKind.REGEX, wanted.regex),
            "structured_outputs.grammar": text_grammar(GrammarKind.EBNF, wanted.grammar),
            "structured_outputs.choice": _choice(wanted.choice),
            "structured_outputs.structural_tag": tag_grammar(wanted.structural_tag),
            "structured_outputs.json_object": json_grammar({"type": "object"} if wanted.json_object else None),
        }


_GRAMMARS: Final = frozenset(GrammarFields.model_fields)


def _said_as(name: str, grammar: Grammar) -> Grammar:
    return replace(grammar, said_as=name)


def json_grammar(schema: Mapping[str, Any] | None) -> Grammar | None:
    return None if schema is None else Grammar.from_schema(schema)


def text_grammar(kind: GrammarKind, text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)


def _choice(choices: Sequence[str] | None) -> Grammar | None:
    return None if choices is None else Grammar.from_choices(choices)
