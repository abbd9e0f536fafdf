"""The fields that chat and completion requests share, and what is said when one is wrong.

Rule: nothing is silently ignored. A field is used, or documented as without effect here, or refused by name unless it
has its neutral value; an unknown field is refused too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from diptych.common.errors import InvalidRequest
from diptych.router.http.sampling_fields import SamplingFields
from diptych.router.http.strict_model import StrictModel
from diptych.router.validation import MAX_PRIORITY

MAX_ERRORS_SHOWN: Final = 3


Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class StreamOptions(StrictModel):
    """How a stream is framed."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # without effect: no padding is sent


class GenerationFields(SamplingFields):
    """What both APIs have in common. `None` is the same as absent."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]]  # what is not supported, and the values that ask for nothing

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    priority: Priority | None = None
    user: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # without effect
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        refuse_unsupported(self, self.NEUTRAL)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available in a stream", param="prompt_logprobs")


def refuse_unsupported(model: BaseModel, neutral: Mapping[str, tuple[object, ...]], *, prefix: str = "") -> None:
    """Raise for the first field of `neutral` that has another value than those, or `None`."""
    for name in sorted(model.model_fields_set & neutral.keys()):
        value = getattr(model, name)
        if value is not None and not any(type(value) is type(same) and value == same for same in neutral[name]):
            raise InvalidRequest(f"{prefix}{name} is not supported by this server", param=f"{prefix}{name}")


def to_invalid_request(error: ValidationError) -> InvalidRequest:
    """Return what the caller should read, with the first wrong field as `param`."""
    details = error.errors(include_url=False, include_input=False)
    words = "; ".join(_describe(item) for item in details[:MAX_ERRORS_SHOWN])
    return InvalidRequest(words, param=_path(details[0]["loc"]) or None)


def _describe(item: ErrorDetails) -> str:
    path, message = _path(item["loc"]), item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
        case "model_type" if not path:
            return "the body must be a JSON object"
        case "missing":
            return f"{path} is required"
        case "extra_forbidden":
            return f"unrecognized request argument: {path}"
    return f"{path}: {message[:1].lower()}{message[1:]}"


def _path(loc: Sequence[int | str]) -> str:
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")
