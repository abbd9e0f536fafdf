"""From the bytes of a body to what the pipeline and the answer need: one function an API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import SamplingParams
from diptych.router.choose.routing import routing_of
from diptych.router.http.anthropic.messages_layout import MessageLayout
from diptych.router.http.anthropic.messages_request import MessagesRequest
from diptych.router.http.exchange.json_extent import check_extent
from diptych.router.http.exchange.timings import HEADER as TIMINGS_HEADER
from diptych.router.http.fields.fields import GenerationFields, to_invalid_request
from diptych.router.http.fields.strict_model import Body
from diptych.router.http.native.generate_layout import GenerateLayout
from diptych.router.http.native.generate_request import GenerateRequest
from diptych.router.http.openai.chat_layout import ChatLayout
from diptych.router.http.openai.chat_request import ChatRequest
from diptych.router.http.openai.completion_layout import CompletionLayout, Layout, Style
from diptych.router.http.openai.completion_request import CompletionRequest
from diptych.router.http.openai.responses_layout import ResponseLayout
from diptych.router.http.openai.responses_request import ResponsesRequest
from diptych.router.keys.caller import ANYBODY, Caller
from diptych.router.request import Prompt
from diptych.router.served_model import ServedModel
from diptych.router.tracing.record import NO_TRACE, Trace
from diptych.router.wish import Wish

TENANT_HEADER: Final = "x-tenant"

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from: what it says outside its body."""

    request_id: str
    headers: Mapping[str, str]
    caller: Caller = ANYBODY
    trace: Trace = NO_TRACE

    def wish(
        self,
        model: str | None,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        user: str | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> Wish:
        """Return what a body wishes that came from here; `others` are fields of a `Wish` that only some APIs have."""
        return Wish(
            model=model or "",
            prompts=prompts,
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            request_id=self.request_id,
            wants_report=self.headers.get(TIMINGS_HEADER) == "1",
            tenant=self.caller.name or self.headers.get(TENANT_HEADER) or user or "",  # a key's holder takes no other's
            caller=self.caller,
            routing=routing_of(self.headers),
            trace=self.trace,
            **others,
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks for, and how the answer is to look."""

    wish: Wish
    layout: Layout
    stream: bool


Parse = Callable[[bytes, Origin, ServedModel], Ask]


def parse_chat(body: bytes, origin: Origin, model: ServedModel) -> Ask:
    """Read the body of a chat completion. Raises `InvalidRequest`."""
    fields = read_fields(ChatRequest, body)
    wish = _wish(fields, [fields.prompt()], fields.output_limit, origin, tool_use=fields.tool_use())
    stream = bool(fields.stream)
    layout = ChatLayout(_named(model, fields), _style(fields), wish.tool_use, stream=stream)
    return Ask(wish, layout, stream)


def parse_completion(body: bytes, origin: Origin, model: ServedModel) -> Ask:
    """Read the body of a completion. Raises `InvalidRequest`."""
    fields = read_fields(CompletionRequest, body)
    only_here = {"best_of": fields.best_of, "echo": bool(fields.echo), "only_reads": fields.output_limit == 0}
    wish = _wish(fields, fields.prompts(), fields.output_limit or 1, origin, **only_here)
    return Ask(wish, CompletionLayout(_named(model, fields), _style(fields)), bool(fields.stream))


def parse_generate(body: bytes, origin: Origin, model: ServedModel) -> Ask:
    """Read the body of /generate. Raises `InvalidRequest`."""
    fields = read_fields(GenerateRequest, body)
    sampling = fields.sampling
    wish = origin.wish(
        fields.lora_path or fields.model,
        fields.prompts(),
        fields.params(),
        max_tokens=sampling.output_limit or 1,
        only_reads=sampling.output_limit == 0,
        shows_special=sampling.shows_special,
        seed=sampling.sampling_seed,
        num_choices=1 if sampling.n is None else sampling.n,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
    )
    layout = GenerateLayout(origin.request_id, model.tokenizer.token_bytes, fields.style)
    return Ask(wish, layout, bool(fields.stream))


def parse_messages(body: bytes, origin: Origin, model: ServedModel) -> Ask:
    """Read the body of a message, as Anthropic's clients write it. Raises `InvalidRequest`."""
    fields = read_fields(MessagesRequest, body)
    prompt = fields.chat()
    user = fields.metadata.user_id if fields.metadata else None
    wish = origin.wish(
        fields.model,
        [prompt],
        fields.sampling_params(),
        user=user,
        max_tokens=fields.max_tokens,
        tool_use=fields.tool_use(),
        cache_salt=fields.cache_salt or "",
    )
    return Ask(wish, MessageLayout(fields.model or model.model_id, fields.max_tokens), bool(fields.stream))


def parse_responses(body: bytes, origin: Origin, model: ServedModel) -> Ask:
    """Read the body of a response, as OpenAI's clients write it. Raises `InvalidRequest`."""
    fields = read_fields(ResponsesRequest, body)
    prompt, use = fields.chat(), fields.tool_use()
    if fields.wants_logprobs and model.formats.splits(use):
        text = "a response has log-probabilities only without tools and reasoning: ask for a chat completion"
        raise InvalidRequest(text, param="include")
    wish = origin.wish(
        fields.model,
        [prompt],
        fields.sampling_params(),
        user=fields.user,
        max_tokens=fields.max_output_tokens,
        seed=fields.seed,
        tool_use=use,
        cache_salt=fields.cache_salt or "",
    )
    token_bytes = model.tokenizer.token_bytes if fields.wants_logprobs else None
    layout = ResponseLayout(fields.model or model.model_id, fields.echoed(), token_bytes)
    return Ask(wish, layout, bool(fields.stream))


def _wish(
    fields: GenerationFields, prompts: Sequence[Prompt], max_tokens: int | None, origin: Origin, **others: Any
) -> Wish:
    """Return what both APIs say alike, and `others` of a `Wish`, that only one says."""
    return origin.wish(
        fields.model_name,
        prompts,
        fields.sampling_params(),
        user=fields.user,
        max_tokens=max_tokens,
        seed=fields.seed,
        num_choices=1 if fields.n is None else fields.n,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        shows_special=fields.shows_special,
        shows_prompt=bool(fields.return_token_ids),
        **others,
    )


def _named(model: ServedModel, fields: GenerationFields) -> ServedModel:
    """The model as the answer calls it: by the adapter's name, if one is asked for."""
    return replace(model, model_id=fields.model_name) if fields.model_name else model


def _style(fields: GenerationFields) -> Style:
    return Style(
        include_usage=fields.include_usage,
        continuous_usage=fields.continuous_usage,
        return_token_ids=bool(fields.return_token_ids),
        names_tokens_by_id=bool(fields.return_tokens_as_token_ids),
        logprobs=fields.num_logprobs is not None,
        echo_logprobs=fields.num_logprobs is not None and fields.echoes,
        prompt_logprobs=fields.prompt_logprobs is not None,
    )


def read_fields(model: type[B], body: bytes) -> B:
    """Raises `InvalidRequest`."""
    check_extent(body)
    try:
        fields = model.model_validate_json(body)
    except ValidationError as error:
        raise to_invalid_request(error) from None
    fields.check()
    return fields
