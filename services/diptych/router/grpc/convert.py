"""`diptych.v1.Inference` messages to the pipeline's values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.common.errors import InvalidRequest
from diptych.engine.finish import Finish
from diptych.engine.runtime.codec import grammar_from_wire
from diptych.engine.sampling_params import SamplingParams
from diptych.router.prepare import Wish
from diptych.router.request import ChatPrompt, Piece, Prompt, TextPrompt, TokenPrompt, Usage
from diptych.v1 import inference_pb2

_FINISH: Final[Mapping[Finish, inference_pb2.FinishReason]] = {
    Finish.STOP: inference_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: inference_pb2.FINISH_REASON_ABORTED,
}


def wish_from_wire(request: inference_pb2.GenerateRequest, request_id: str, timeout_s: float | None) -> Wish:
    """Raises `InvalidRequest` if there is no prompt."""
    sampling = request.sampling
    return Wish(
        model=request.model,
        prompts=[_prompt(request)],
        params=_params(sampling),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        request_id=request_id,
        timeout_s=timeout_s,
        priority=request.priority,
        tenant=request.tenant,
    )


def chunk_to_wire(piece: Piece, request_id: str) -> inference_pb2.GenerateChunk:
    chunk = inference_pb2.GenerateChunk(request_id=request_id, text=piece.text, token_ids=piece.token_ids)
    if piece.end is not None:
        chunk.finish_reason = _FINISH[piece.end.finish]
        chunk.usage.CopyFrom(usage_to_wire(piece.end.usage))
    return chunk


def usage_to_wire(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "tokens":
            return TokenPrompt(list(request.tokens.ids))
        case "chat":
            return ChatPrompt([{"role": turn.role, "content": turn.content} for turn in request.chat.messages])
    raise InvalidRequest("no prompt: set text, tokens or chat", param="prompt")


def _params(sampling: inference_pb2.SamplingParams) -> SamplingParams:
    default = SamplingParams()
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else default.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else default.top_p,
        top_k=sampling.top_k,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        grammar=grammar_from_wire(sampling.grammar),
    )
