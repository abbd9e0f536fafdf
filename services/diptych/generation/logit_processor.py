"""Which of the operator's processors changes a request's logits, and by what. The request brings its name, no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from diptych.common.errors import InvalidRequest

MAX_NAME_LEN: Final = 64  # characters
MAX_PARAMS_LEN: Final = 16_384  # characters of JSON


@dataclass(frozen=True, slots=True)
class ProcessorChoice:
    """One processor, by the name under which workers have it."""

    name: str
    params: str = "{}"  # a JSON object, which the processor is called with

    def validate(self) -> None:
        """Raise `InvalidRequest`, naming the field."""
        if not 1 <= len(self.name) <= MAX_NAME_LEN:
            words = f"custom_logit_processor is a name of 1 to {MAX_NAME_LEN} characters, not of {len(self.name)}"
            raise InvalidRequest(words, param="custom_logit_processor")
        self.read_params()

    def read_params(self) -> Mapping[str, Any]:
        """Raises `InvalidRequest` for what is no JSON object, or too long."""
        if len(self.params) > MAX_PARAMS_LEN:
            words = f"custom_params may have {MAX_PARAMS_LEN} characters as JSON, not {len(self.params)}"
            raise InvalidRequest(words, param="custom_params")
        try:
            read = json.loads(self.params)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"custom_params is no JSON: {error}", param="custom_params") from None
        if not isinstance(read, dict):
            raise InvalidRequest("custom_params must be a JSON object", param="custom_params")
        return read
