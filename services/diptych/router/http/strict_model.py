"""What every part of a request's body is built on."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """No field besides the declared ones, and no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)
