"""The smaller parts of the body of /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import Grammar
from diptych.router.http.fields.strict_model import StrictModel


class TextFormat(StrictModel):
    """What the output must match."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    # without effect
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def grammar(self) -> Grammar | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar.from_schema({"type": "object"})
        if self.json_schema is None:
            raise InvalidRequest("text.format.schema is required", param="text.format.schema")
        return Grammar.from_schema(self.json_schema)


class TextConfig(StrictModel):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class Reasoning(StrictModel):
    """How the model is to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # without effect
    summary: str | None = None
    generate_summary: str | None = None


class StreamOptions(StrictModel):
    """How a stream is framed."""

    include_obfuscation: bool | None = None  # without effect: no padding is sent
