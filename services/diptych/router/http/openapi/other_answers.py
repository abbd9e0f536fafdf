"""What Anthropic's paths, the native ones and those for operators answer. For the OpenAPI document alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel


class AnthropicErrorDetails(BaseModel):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Any answer but a good one."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class ContentBlock(BaseModel):
    """Text, thinking, or the use of a tool; which, says its type."""

    type: Literal["text", "thinking", "tool_use"]


class MessageUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """Of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Of /v1/messages/count_tokens."""

    input_tokens: int


class Tokens(BaseModel):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Of /detokenize."""

    prompt: str


class MetaInfo(BaseModel):
    """What is known of an output."""

    id: str
    finish_reason: dict[str, Any] | None


class GeneratedOutput(BaseModel):
    """One output."""

    index: int
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class Generated(RootModel[GeneratedOutput | list[GeneratedOutput]]):
    """Of /generate: a list if several outputs were asked for."""


class Status(BaseModel):
    """Of /health."""

    status: str


class Version(BaseModel):
    """Of /version."""

    version: str


class Welcome(BaseModel):
    """Of the address alone."""

    name: str
    apis: list[str]


class Probe(BaseModel):
    """Of /health/live and its neighbours."""

    status: str
    reason: str


class Readiness(BaseModel):
    """Of /ready."""

    ready: bool
    reason: str


class Worker(BaseModel):
    """A worker, as the router knows it."""

    instance: str
    role: Literal["prefill", "decode", "unified"]
    address: str
    model: str
    pool: str
    pod: str
    version: str
    state: str
    not_ready: str
    is_connected: bool
    is_paused: bool
    context_len: int
    adapters: list[str]
    linked: list[str]
    link_bytes_per_s: dict[str, float]
    open_legs: int
    num_requests: int
    queued_tokens: int
    free_tokens: int
    has_credit: bool
    queued_transfer_bytes: int
    cached_pages: int
    is_cache_known: bool


class WorkerList(BaseModel):
    """Of /admin/workers."""

    router: str
    problem: str | None
    workers: list[Worker]


class Attempt(BaseModel):
    """One choice of workers for a request, and what came of it."""

    policy: str
    reason: str
    room: str
    prefill_instance: str
    decode_instance: str
    outcome: str
    predicted_ttft_s: float | None
    ttft_s: float | None
    duration_s: float | None


class ExplainedRequest(BaseModel):
    """One request of a call."""

    attempts: list[Attempt]


class Explanation(BaseModel):
    """Of /admin/explain."""

    request_id: str
    requests: list[ExplainedRequest]


class DrainProgress(BaseModel):
    """Of /admin/drain."""

    phase: str
    instances: dict[str, dict[str, Any]]


class OperatorError(BaseModel):
    """Any answer to an operator but a good one."""

    error: str
