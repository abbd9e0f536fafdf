"""From the bytes of a body to what the pipeline and the answer need: one function an API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from diptych.common.errors import InvalidRequest
from diptych.generation.request_groups import Life
from diptych.generation.sampling_params import SamplingParams
from diptych.router.extents.json_extent import check_extent
from diptych.router.http.anthropic.messages_layout import MessageLayout
from diptych.router.http.anthropic.messages_request import MessagesRequest
from diptych.router.http.exchange.layout import Layout
from diptych.router.http.exchange.timings import HEADER as TIMINGS_HEADER
from diptych.router.http.fields.fields import GenerationFields, to_invalid_request
from diptych.router.http.fields.request_fields import RequestFields
from diptych.router.http.fields.strict_model import Body
from diptych.router.http.native.generate_layout import GenerateLayout
from diptych.router.http.native.generate_request import GenerateRequest
from diptych.router.http.openai.chat_layout import ChatLayout
from diptych.router.http.openai.chat_request import ChatRequest
from diptych.router.http.openai.completion_layout import CompletionLayout, Style
from diptych.router.http.openai.completion_request import CompletionRequest
from diptych.router.http.openai.responses_layout import ResponseLayout
from diptych.router.http.openai.responses_request import ResponsesRequest
from diptych.router.keys.caller import Caller
from diptych.router.tracing.record import Trace
from diptych.router.values.request import ClientRequest, Prompt, ServedModel, routing_of
from diptych.router.values.slo_tiers import wish_in

TENANT_HEADER: Final = "x-tenant"

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from: what it says outside its body."""

    request_id: str
    headers: Mapping[str, str]
    caller: Caller
    trace: Trace
    priority: int | None = None  # in place of what the body says

    def request(
        self,
        fields: RequestFields,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        user: str | None = None,
        **others: Any,
    ) -> ClientRequest:
        """Return what a body that came from here asks for; `others` are fields that only some APIs have."""
        caller = self.caller
        tenant = caller.name or self.headers.get(TENANT_HEADER) or user or ""  # a key's holder takes no other's share
        account = fields.account(tenant)
        return ClientRequest(
            model=fields.model_name or "",
            prompts=prompts,
            params=params,
            account=account if self.priority is None else replace(account, priority=self.priority),
            hints=fields.hints(caller.cache_owner),
            wish=wish_in(self.headers).over(fields.wish()),
            life=Life(self.request_id, time.monotonic()),
            stream=bool(fields.stream),
            wants_report=self.headers.get(TIMINGS_HEADER) == "1",
            caller=caller,
            routing=routing_of(self.headers).in_group(fields.affinity),
            tool=fields.tool,
            trace=self.trace,
            rids=[fields.rid] if fields.rid else (),
            **others,
        )


Parsed = tuple[ClientRequest, Layout]  # what a client asks for, and how the answer is to look
Find = Callable[[str], ServedModel]  # by what a request calls it; raises the caller's `DiptychError`
Parse = Callable[[bytes, Origin, Find], Parsed]


def parse_chat(body: bytes, origin: Origin, find: Find) -> Parsed:
    """Read the body of a chat completion. Raises `InvalidRequest`."""
    fields = read_fields(ChatRequest, body)
    model = find(fields.model_name or "")
    only_here = {"tool_use": fields.tool_use(), "predicted_text": fields.predicted_text}
    request = _request(fields, [fields.prompt()], fields.output_limit, origin, **only_here)
    return request, ChatLayout(_named(model, fields), _style(fields), request.tool_use, stream=request.stream)


def parse_completion(body: bytes, origin: Origin, find: Find) -> Parsed:
    """Read the body of a completion. Raises `InvalidRequest`."""
    fields = read_fields(CompletionRequest, body)
    model = find(fields.model_name or "")
    only_here: dict[str, Any] = {"best_of": fields.best_of, "echo": bool(fields.echo)}
    only_here |= {"only_reads": fields.output_limit == 0, "predicted_text": fields.predicted_text}
    request = _request(fields, fields.prompts(), fields.output_limit or 1, origin, **only_here)
    return request, CompletionLayout(_named(model, fields), _style(fields, echoes=request.echo))


def parse_generate(body: bytes, origin: Origin, find: Find) -> Parsed:
    """Read the body of /generate. Raises `InvalidRequest`."""
    fields = read_fields(GenerateRequest, body)
    model = find(fields.model_name or "")
    sampling = fields.sampling
    request = origin.request(
        fields,
        fields.prompts(),
        fields.params(),
        max_tokens=sampling.output_limit or 1,
        only_reads=sampling.output_limit == 0,
        shows_special=sampling.shows_special,
        seed=sampling.sampling_seed,
        num_choices=1 if sampling.n is None else sampling.n,
        predicted_text=fields.predicted_text,
        follow=fields.follow,
    )
    return request, GenerateLayout(fields.rid or origin.request_id, model.tokenizer.token_bytes, fields.style)


def parse_messages(body: bytes, origin: Origin, find: Find) -> Parsed:
    """Read the body of a message, as Anthropic's clients write it. Raises `InvalidRequest`."""
    fields = read_fields(MessagesRequest, body)
    model = find(fields.model_name or "")
    request = origin.request(
        fields,
        [fields.chat()],
        fields.sampling_params(),
        user=fields.metadata.user_id if fields.metadata else None,
        max_tokens=fields.max_tokens,
        tool_use=fields.tool_use(),
    )
    return request, MessageLayout(fields.model or model.model_id, fields.max_tokens)


def parse_responses(body: bytes, origin: Origin, find: Find) -> Parsed:
    """Read the body of a response, as OpenAI's clients write it. Raises `InvalidRequest`."""
    fields = read_fields(ResponsesRequest, body)
    model = find(fields.model_name or "")
    prompt, use = fields.chat(), fields.tool_use()
    if fields.wants_logprobs and model.formats.splits(use):
        text = "a response has log-probabilities only without tools and reasoning: ask for a chat completion"
        raise InvalidRequest(text, param="include")
    request = origin.request(
        fields,
        [prompt],
        fields.sampling_params(),
        user=fields.user,
        max_tokens=fields.max_output_tokens,
        seed=fields.seed,
        tool_use=use,
    )
    token_bytes = model.tokenizer.token_bytes if fields.wants_logprobs else None
    return request, ResponseLayout(fields.model or model.model_id, fields.echoed(), token_bytes)


def _request(
    fields: GenerationFields, prompts: Sequence[Prompt], max_tokens: int | None, origin: Origin, **others: Any
) -> ClientRequest:
    """Return what both APIs say alike, and `others`, that only one says."""
    return origin.request(
        fields,
        prompts,
        fields.sampling_params(),
        user=fields.user,
        max_tokens=max_tokens,
        seed=fields.seed,
        num_choices=1 if fields.n is None else fields.n,
        shows_special=fields.shows_special,
        shows_prompt=bool(fields.return_token_ids),
        **others,
    )


def _named(model: ServedModel, fields: GenerationFields) -> ServedModel:
    """The model as the answer calls it: by the adapter's name, if one is asked for."""
    return replace(model, model_id=fields.model_name) if fields.model_name else model


def _style(fields: GenerationFields, *, echoes: bool = False) -> Style:
    options = fields.stream_options
    return Style(
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        names_tokens_by_id=bool(fields.return_tokens_as_token_ids),
        logprobs=fields.num_logprobs is not None,
        echo_logprobs=fields.num_logprobs is not None and echoes,
        prompt_logprobs=fields.prompt_logprobs is not None,
    )


def read_fields(model: type[B], body: bytes) -> B:
    """Raises `InvalidRequest`."""
    check_extent(body)
    try:
        fields = model.model_validate_json(body)
    except ValidationError as error:
        raise to_invalid_request(error, body) from None
    fields.check()
    return fields
