"""What OpenAI's paths answer. For the OpenAPI document: answers are written by layouts, not by these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetails(BaseModel):
    """What is wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Any answer but a good one."""

    error: ErrorDetails


class CachedTokens(BaseModel):
    """Of the prompt."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class FunctionOfCall(BaseModel):
    """What is called, and how."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AssistantMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] = []
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    """One of the outputs."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


class ChatCompletion(BaseModel):
    """Of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    """One of the outputs."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]


class Completion(BaseModel):
    """Of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(BaseModel):
    """A model, or an adapter of it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    context_len: int
    max_model_len: int
    parent: str | None = None


class ModelList(BaseModel):
    """Of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class OutputItem(BaseModel):
    """A message, reasoning, or the call of a function; which, says its type."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class InputDetails(BaseModel):
    """Of the input tokens."""

    cached_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    total_tokens: int


class Response(BaseModel):
    """Of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
