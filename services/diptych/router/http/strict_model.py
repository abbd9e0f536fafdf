"""What every part of a request's body is built on."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import SkipJsonSchema

Unsupported = Annotated[Any, SkipJsonSchema()]  # a field that is known, to be refused by name; not documented


class StrictModel(BaseModel):
    """No field besides the declared ones, and no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(StrictModel):
    """All of a body."""

    def check(self) -> None:
        """Raise `InvalidRequest` for fields that are right by themselves, and wrong together."""
