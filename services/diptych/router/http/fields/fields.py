"""The fields that OpenAI's APIs share, and what is said when one is wrong.

Rule: nothing is silently ignored. A field is used, or documented as without effect here, or refused by name unless it
has its neutral value (`neutral_values`); an unknown field is refused too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import MAX_ALLOWED_TOKENS, SamplingParams
from diptych.router.http.fields.attention_fields import AttentionFields
from diptych.router.http.fields.grammar_fields import GrammarFields
from diptych.router.http.fields.request_fields import (
    ChoiceFields,
    ProcessorName,
    RequestFields,
    Seed,
    Token,
    params_of,
    processor_of,
)
from diptych.router.http.fields.strict_model import MAX_ERRORS_LISTED, MAX_ERRORS_SHOWN, StrictModel, too_many_errors
from diptych.router.values.request import MAX_SESSION_LEN

MAX_READ: Final = 1 << 16  # characters of JSON in a text, of which parts are named: more may become much in memory


class StreamOptions(StrictModel):
    """How a stream is framed."""

    include_usage: bool = False
    continuous_usage_stats: bool | None = None  # in every chunk
    include_obfuscation: bool | None = None  # without effect: no padding is sent


class OpenAIFields(RequestFields):
    """What chats, completions and responses have in common. `None` is the same as absent."""

    seed: Seed | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None  # a response repeats it
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SESSION_LEN)] | None = None  # names a group: see `affinity`
    # without effect
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def affinity(self) -> str:
        return self.prompt_cache_key or ""


class GenerationFields(OpenAIFields, ChoiceFields, GrammarFields, AttentionFields):
    """What chats and completions have in common."""

    lora_path: str | None = None  # an adapter's name, as SGLang's clients say it beside or instead of `model`
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    min_tokens: int | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    prompt_logprobs: int | None = None
    custom_logit_processor: ProcessorName | None = None  # one that workers have by that name
    custom_params: dict[str, Any] | None = None  # that it is called with
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def model_name(self) -> str | None:
        return self.lora_path or self.model

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show with the log-probability of each output token; None: show nothing."""
        raise NotImplementedError

    def sampling_params(self) -> SamplingParams:
        """Return all but `max_tokens` and `seed`."""
        return params_of(
            self,
            logprobs=self.num_logprobs,
            grammar=self.grammar(),
            attention=self.attention(),
            processor=processor_of(self.custom_logit_processor, self.custom_params),
        )

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available in a stream", param="prompt_logprobs")


def to_invalid_request(error: ValidationError, body: bytes) -> InvalidRequest:
    """Return what the caller should read, with the first wrong field as `param`."""
    if error.error_count() > MAX_ERRORS_LISTED:
        return InvalidRequest(too_many_errors(error.error_count()))
    details = error.errors(include_url=False, include_input=False)
    asked = None if details[0]["type"] == "json_invalid" else from_json(body)
    by_field = groupby(details[:MAX_ERRORS_SHOWN], lambda item: _path(item, asked))
    words = "; ".join(_describe(path, items) for path, items in by_field)
    return InvalidRequest(words, param=_path(details[0], asked) or None)


def _describe(path: str, items: Iterable[ErrorDetails]) -> str:
    """Say what a field should be; of one that may be several things, each of them."""
    first, *others = items
    said, first_words = _said_of(path, first), _words(first)
    further = dict.fromkeys(words for each in others if (words := _words(each)) != first_words)
    return "; or ".join([said, *(words.removeprefix("input should be ") for words in further)])


def _said_of(path: str, item: ErrorDetails) -> str:
    words = _words(item)
    match item["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {words.removeprefix('invalid JSON: ')}"
        case "model_type" if not path:
            return "the body must be a JSON object"
        case "missing":
            return f"{path} is required"
        case "extra_forbidden":
            return f"unrecognized request argument: {path}"
    return f"{path}: {words}"


def _words(item: ErrorDetails) -> str:
    match item["type"]:
        case "union_tag_invalid":
            return f"type is one of {item['ctx']['expected_tags']}, not {item['ctx']['tag']!r}"
        case "union_tag_not_found":
            return "type is required"
    message = item["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return f"{message[:1].lower()}{message[1:]}"


def _path(item: ErrorDetails, asked: object) -> str:
    """Name a field as the client wrote it in `asked`: pydantic says, too, as which of several things it was read."""
    path, loc = "", item["loc"]
    for place, step in enumerate(loc, 1):
        inside = _inside(asked, step)
        if inside:
            asked = inside[0]
        elif item["type"] != "missing" or place < len(loc):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")


def _inside(asked: object, step: int | str) -> Sequence[object]:
    """Return what is at a step of a path, or nothing. Some fields may be JSON in a text."""
    if isinstance(asked, str) and len(asked) <= MAX_READ:
        with suppress(ValueError):
            asked = from_json(asked)
    if isinstance(asked, dict):
        return [asked[str(step)]] if str(step) in asked else []
    return asked[step : step + 1] if isinstance(asked, list) and isinstance(step, int) else []
