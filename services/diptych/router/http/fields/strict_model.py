"""What every part of a request's body is built on."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import SkipJsonSchema

from diptych.common.errors import InvalidRequest
from diptych.router.http.fields.neutral_values import NEUTRAL, is_neutral

MAX_ERRORS_SHOWN: Final = 3
MAX_ERRORS_LISTED: Final = 256  # each takes as long as a field that is right

Unsupported = Annotated[Any, SkipJsonSchema()]  # a field that is known, to be refused by name; not documented


class StrictModel(BaseModel):
    """No field besides the declared ones, and no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ConversationPart(StrictModel):
    """A part of a conversation, which clients send back with what others put into it: unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


class Body(StrictModel):
    """All of a body."""

    def check(self) -> None:
        """Raise `InvalidRequest` for fields that are right by themselves, and wrong together."""


def _document(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Say in the schema what is taken beside the fields."""
    schema["additionalProperties"] = False
    names = sorted(NEUTRAL.keys() - model.model_fields.keys())
    schema["properties"] |= {name: {"enum": [*NEUTRAL[name], None]} for name in names}


class GenerationBody(Body):
    """What asks for output. Fields of other servers are taken where they ask for nothing."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_document)

    def check(self) -> None:
        self.refuse_unsupported()

    def refuse_unsupported(self, prefix: str = "") -> None:
        """Raise `InvalidRequest` for a field that nobody knows, or that asks for what can't be done."""
        extra = self.model_extra or {}
        unknown = [f"{prefix}{name}" for name in extra if name not in NEUTRAL]
        if unknown:
            raise InvalidRequest(_words(unknown), param=unknown[0] if len(unknown) <= MAX_ERRORS_LISTED else None)
        for name in sorted(extra):
            if not is_neutral(extra[name], NEUTRAL[name]):
                raise InvalidRequest(f"{prefix}{name} is not supported by this server", param=f"{prefix}{name}")


def too_many_errors(count: int) -> str:
    return f"{count} things are wrong with the body: look for fields that nobody knows"


def _words(unknown: list[str]) -> str:
    if len(unknown) > MAX_ERRORS_LISTED:
        return too_many_errors(len(unknown))
    return "; ".join(f"unrecognized request argument: {name}" for name in unknown[:MAX_ERRORS_SHOWN])
