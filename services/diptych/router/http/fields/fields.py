"""The fields that chat and completion requests share, and what is said when one is wrong.

Rule: nothing is silently ignored. A field is used, or documented as without effect here, or refused by name unless it
has its neutral value (`neutral_values`); an unknown field is refused too.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from diptych.common.errors import InvalidRequest
from diptych.router.http.fields.request_fields import RequestFields
from diptych.router.http.fields.sampling_fields import SamplingFields
from diptych.router.http.fields.strict_model import MAX_ERRORS_LISTED, MAX_ERRORS_SHOWN, StrictModel, too_many_errors


class StreamOptions(StrictModel):
    """How a stream is framed."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = None  # in every chunk
    include_obfuscation: bool | None = None  # without effect: no padding is sent


class GenerationFields(RequestFields, SamplingFields):
    """What both APIs have in common. `None` is the same as absent."""

    lora_path: str | None = None  # an adapter's name, as SGLang's clients say it beside or instead of `model`
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # without effect
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def model_name(self) -> str | None:
        return self.lora_path or self.model

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available in a stream", param="prompt_logprobs")


def to_invalid_request(error: ValidationError) -> InvalidRequest:
    """Return what the caller should read, with the first wrong field as `param`."""
    if error.error_count() > MAX_ERRORS_LISTED:
        return InvalidRequest(too_many_errors(error.error_count()))
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
