"""From the bytes of a body to what the pipeline and the answer need: one function an API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from pydantic import ValidationError

from diptych.router.http.chat_request import ChatRequest
from diptych.router.http.completion_request import CompletionRequest
from diptych.router.http.fields import GenerationFields, to_invalid_request
from diptych.router.http.layout import ChatLayout, CompletionLayout, Layout, Style
from diptych.router.http.timings import HEADER as TIMINGS_HEADER
from diptych.router.prepare import ServedModel, Wish
from diptych.router.request import Prompt

TENANT_HEADER: Final = "x-tenant"

R = TypeVar("R", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from: what it says outside its body."""

    request_id: str
    headers: Mapping[str, str]

    @property
    def tenant(self) -> str:
        return self.headers.get(TENANT_HEADER, "")

    @property
    def wants_report(self) -> bool:
        return self.headers.get(TIMINGS_HEADER) == "1"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks for, and how the answer is to look."""

    wish: Wish
    layout: Layout
    stream: bool


Parse = Callable[[bytes, Origin, ServedModel], Ask]


def parse_chat(body: bytes, origin: Origin, model: ServedModel) -> Ask:
    """Read the body of a chat completion. Raises `InvalidRequest`."""
    fields = _parse(ChatRequest, body)
    wish = _wish(fields, [fields.prompt()], fields.output_limit, origin)
    stream = bool(fields.stream)
    return Ask(wish, ChatLayout(_named(model, fields), _style(fields), stream=stream), stream)


def parse_completion(body: bytes, origin: Origin, model: ServedModel) -> Ask:
    """Read the body of a completion. Raises `InvalidRequest`."""
    fields = _parse(CompletionRequest, body)
    wish = _wish(fields, fields.prompts(), fields.max_tokens, origin)
    wish = replace(wish, best_of=fields.best_of, echo=bool(fields.echo))
    return Ask(wish, CompletionLayout(_named(model, fields), _style(fields)), bool(fields.stream))


def _wish(fields: GenerationFields, prompts: Sequence[Prompt], max_tokens: int | None, origin: Origin) -> Wish:
    return Wish(
        model=fields.model or "",
        prompts=prompts,
        params=fields.sampling_params(),
        max_tokens=max_tokens,
        seed=fields.seed,
        num_choices=1 if fields.n is None else fields.n,
        request_id=origin.request_id,
        wants_report=origin.wants_report,
        priority=fields.priority or 0,
        tenant=origin.tenant or fields.user or "",
        cache_salt=fields.cache_salt or "",
    )


def _named(model: ServedModel, fields: GenerationFields) -> ServedModel:
    """The model as the answer calls it: by the adapter's name, if one is asked for."""
    return replace(model, model_id=fields.model) if fields.model else model


def _style(fields: GenerationFields) -> Style:
    return Style(
        include_usage=fields.include_usage,
        return_token_ids=bool(fields.return_token_ids),
        logprobs=fields.num_logprobs is not None,
        echo_logprobs=fields.num_logprobs is not None and fields.echoes,
        prompt_logprobs=fields.prompt_logprobs is not None,
    )


def _parse(model: type[R], body: bytes) -> R:
    try:
        fields = model.model_validate_json(body)
    except ValidationError as error:
        raise to_invalid_request(error) from None
    fields.check()
    return fields
