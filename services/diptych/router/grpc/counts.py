"""How many of each a message of a client may hold: looked at before anything is made of them. Pure."""

from __future__ import annotations

from collections.abc import Sized

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_REGEX,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from diptych.router.serve.validation import MAX_MESSAGES, MAX_PARTS, MAX_TOKENS, MAX_TOOLS
from diptych.v1.inference_pb2 import (
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    SamplingParams,
    TokenizeRequest,
)


def check_generation(request: GenerateRequest) -> None:
    """Raises `InvalidRequest`."""
    _check_sampling(request.sampling)
    _check_chat(request.chat)
    _check("tokens", request.tokens.ids, MAX_TOKENS)


def check_text(request: TokenizeRequest) -> None:
    """Raises `InvalidRequest`."""
    _check_chat(request.chat)


def check_tokens(request: DetokenizeRequest) -> None:
    """Raises `InvalidRequest`."""
    _check("token_ids", request.token_ids, MAX_TOKENS)


def _check_sampling(sampling: SamplingParams) -> None:
    _check("stop", sampling.stop, MAX_STOP_STRINGS)
    _check("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS)
    _check("stop_regex", sampling.stop_regex, MAX_STOP_REGEX)
    _check("logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS)
    _check("allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS)


def _check_chat(chat: ChatMessages) -> None:
    _check("chat.messages", chat.messages, MAX_MESSAGES)
    _check("chat.tools", chat.tools, MAX_TOOLS)
    for index, message in enumerate(chat.messages):
        _check(f"chat.messages[{index}].tool_calls", message.tool_calls, MAX_PARTS)


def _check(param: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise InvalidRequest(f"{param} takes at most {most}, not {len(items)}", param=param)
