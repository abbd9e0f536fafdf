"""The fields that every API has under the same names: of the request itself, whatever it asks for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from diptych.generation.request_groups import MAX_PRIORITY, Account, Hints
from diptych.router.http.fields.strict_model import GenerationBody
from diptych.router.keys.cache_namespace import hints_of


class RequestFields(GenerationBody):
    """`None` is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: str | None = None

    @property
    def model_name(self) -> str | None:
        return self.model

    def account(self, tenant: str) -> Account:
        return Account(tenant, self.priority or 0)

    def hints(self, cache_owner: bytes) -> Hints:
        """Raises `InvalidRequest`."""
        return hints_of(cache_owner, self.cache_salt or "")
