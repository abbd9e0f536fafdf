"""`diptych.v1.Inference` messages to the pipeline's values and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from diptych.common.errors import InvalidRequest
from diptych.generation.codec import account_from_wire, logprobs_to_wire, params_from_wire
from diptych.generation.finish import Finish
from diptych.router.grpc.chat import answer_to_wire, chat_prompt, part_to_wire, tool_use_of
from diptych.router.keys.cache_namespace import hints_of
from diptych.router.keys.caller import Caller
from diptych.router.output import Output, Piece, Usage, total_usage
from diptych.router.request import ChatPrompt, ClientRequest, Prompt, TextPrompt, TokenPrompt
from diptych.router.serve.best_of import choose_best
from diptych.v1 import inference_pb2

_FINISH: Final[Mapping[Finish, inference_pb2.FinishReason]] = {
    Finish.STOP: inference_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: inference_pb2.FINISH_REASON_ABORTED,
}


def request_from_wire(request: inference_pb2.GenerateRequest, caller: Caller) -> ClientRequest:
    """Return what the message says. Raises `InvalidRequest`."""
    sampling, account = request.sampling, account_from_wire(request)
    return ClientRequest(
        model=request.model,
        prompts=[_prompt(request)],
        params=replace(params_from_wire(sampling), stop=tuple(sampling.stop), stop_regex=tuple(sampling.stop_regex)),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        account=replace(account, tenant=caller.name or account.tenant),  # a key's holder takes nobody else's share
        hints=hints_of(caller.cache_owner, request.cache_salt),
        num_choices=request.n or 1,
        best_of=request.best_of or None,
        echo=request.echo,
        shows_special=request.show_special_tokens,
        tool_use=tool_use_of(request.chat),
        caller=caller,
    )


def chunk_to_wire(index: int, piece: Piece, client: ClientRequest) -> inference_pb2.GenerateChunk:
    chunk = inference_pb2.GenerateChunk(
        request_id=client.life.request_id, text=piece.text, token_ids=piece.token_ids, index=index
    )
    if piece.end is not None:
        chunk.finish_reason = _FINISH[piece.end.finish]
        chunk.usage.CopyFrom(_usage_to_wire(piece.end.usage))
        chunk.matched_stop = piece.end.stop
    if piece.scores is not None:
        chunk.logprobs.CopyFrom(logprobs_to_wire(piece.scores.logprobs))
    if piece.prompt is not None:
        chunk.prompt_logprobs.CopyFrom(logprobs_to_wire(piece.prompt.logprobs))
    if isinstance(client.prompts[0], ChatPrompt):
        chunk.parts.extend(part_to_wire(part) for part in piece.parts)
    return chunk


def response_to_wire(outputs: Sequence[Output], client: ClientRequest) -> inference_pb2.GenerateResponse:
    """Return the best of all outputs that were made."""
    first, *others = [_choice_to_wire(index, output, client) for index, output in enumerate(_best(outputs, client))]
    response = inference_pb2.GenerateResponse(
        request_id=client.life.request_id,
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=_usage_to_wire(total_usage([output.end.usage for output in outputs], client.num_made)),
        more_choices=others,
        matched_stop=first.matched_stop,
    )
    if first.HasField("answer"):
        response.answer.CopyFrom(first.answer)
    if first.HasField("logprobs"):
        response.logprobs.CopyFrom(first.logprobs)
    if outputs[0].prompt is not None:
        response.prompt_logprobs.CopyFrom(logprobs_to_wire(outputs[0].prompt.logprobs))
    return response


def _best(outputs: Sequence[Output], client: ClientRequest) -> Sequence[Output]:
    return choose_best(outputs, client.num_made, client.num_choices)


def _choice_to_wire(index: int, output: Output, client: ClientRequest) -> inference_pb2.Choice:
    choice = inference_pb2.Choice(
        index=index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=_FINISH[output.end.finish],
        matched_stop=output.end.stop,
    )
    if output.scores is not None and client.params.logprobs is not None:  # else they served to choose the best
        choice.logprobs.CopyFrom(logprobs_to_wire(output.scores.logprobs))
    if isinstance(client.prompts[0], ChatPrompt):
        choice.answer.CopyFrom(answer_to_wire(output.parts))
    return choice


def _usage_to_wire(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def prompt_to_tokenize(request: inference_pb2.TokenizeRequest) -> Prompt:
    """Raises `InvalidRequest` if there is none."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text, add_special_tokens=not request.no_special_tokens)
        case "chat":
            return chat_prompt(request.chat)
    raise InvalidRequest("no prompt: set text or chat", param="prompt")


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "tokens":
            return TokenPrompt(list(request.tokens.ids))
        case "chat":
            return chat_prompt(request.chat)
    raise InvalidRequest("no prompt: set text, tokens or chat", param="prompt")
