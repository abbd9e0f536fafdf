"""`diptych.v1.Inference` messages to the pipeline's values and back; of chats, turns and tools, parts and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import grpc
from pydantic_core import from_json

from diptych.common.errors import DiptychError, InvalidRequest, Overloaded, Unavailable
from diptych.common.event_loop import in_turns
from diptych.generation.codec import (
    FINISH_TO_WIRE,
    account_from_wire,
    insight_to_wire,
    logprobs_to_wire,
    params_from_wire,
)
from diptych.generation.embed_rows import check_row_bytes
from diptych.generation.request_groups import MAX_TOOL_LEN, Account
from diptych.generation.sampling_params import SamplingParams
from diptych.router.extents.message_extent import check_count
from diptych.router.keys.cache_namespace import hints_of
from diptych.router.keys.caller import Caller
from diptych.router.serve.sessions import MAX_COUNT, MAX_RID_LEN, MAX_SESSION_ID_LEN, MAX_WAIT_S, Wish
from diptych.router.text.content_parts import content_of, without_images
from diptych.router.text.parsing.parts import Content, Part, Reasoning, ToolArguments, ToolCallStart, message_of
from diptych.router.text.parsing.tool_use import NO_ARGUMENTS, NO_TOOLS, Choice, Function, ToolUse, choose
from diptych.router.values.images import ImageInput, image_at
from diptych.router.values.kept_sessions import MAX_IDLE_S, Follow
from diptych.router.values.output import Output, Piece, Scores, Usage, choose_best, total_usage
from diptych.router.values.request import (
    ChatPrompt,
    ClientRequest,
    PoolingParams,
    Prompt,
    RowsPrompt,
    TextPrompt,
    TokenPrompt,
)
from diptych.router.values.slo_tiers import SloWish
from diptych.router.values.validation import MAX_INPUTS, MAX_TOKENS
from diptych.router.values.vectors import Pooled
from diptych.v1 import inference_pb2
from diptych.v1.inference_pb2 import ChatAnswer, ChatMessage, ChatMessages, ChatPart, ContentPart, Tool, ToolCall

_CHOICES: Final[Mapping[int, Choice]] = {
    inference_pb2.TOOL_CHOICE_AUTO: "auto",
    inference_pb2.TOOL_CHOICE_REQUIRED: "required",
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
        hints=hints_of(caller.cache_owner, request.cache_salt, request.speculate, request.expected_output_tokens),
        tool=request.tool[:MAX_TOOL_LEN],
        wish=SloWish(request.slo.tier, request.slo.ttft_ms, request.slo.tpot_ms),
        num_choices=request.n or 1,
        best_of=request.best_of or None,
        echo=request.echo,
        shows_special=request.show_special_tokens,
        tool_use=tool_use_of(request.chat),
        predicted_text=request.prediction,
        caller=caller,
    )


def chunk_to_wire(index: int, piece: Piece, client: ClientRequest) -> inference_pb2.GenerateChunk:
    chunk = inference_pb2.GenerateChunk(
        request_id=client.life.request_id,
        text=piece.text,
        token_ids=piece.token_ids,
        index=index,
        logprobs=_scores_to_wire(piece.scores),
        prompt_logprobs=_scores_to_wire(piece.prompt),
        **insight_to_wire(piece.insight),
    )
    if piece.end is not None:
        chunk.finish_reason = FINISH_TO_WIRE[piece.end.finish]
        chunk.usage.CopyFrom(_usage_to_wire(piece.end.usage))
        chunk.matched_stop, chunk.weights_version = piece.end.stop, piece.end.weights_version
    if isinstance(client.prompts[0], ChatPrompt):
        chunk.parts.extend(part_to_wire(part) for part in piece.parts)
    return chunk


def response_to_wire(outputs: Sequence[Output], client: ClientRequest) -> inference_pb2.GenerateResponse:
    """Return the best of all outputs that were made."""
    best = choose_best(outputs, client.num_made, client.num_choices)
    first, *others = [_choice_to_wire(index, output, client) for index, output in enumerate(best)]
    return inference_pb2.GenerateResponse(
        request_id=client.life.request_id,
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=_usage_to_wire(total_usage([output.end.usage for output in outputs], client.num_made)),
        more_choices=others,
        matched_stop=first.matched_stop,
        weights_version=best[0].end.weights_version,
        answer=first.answer if first.HasField("answer") else None,
        logprobs=first.logprobs if first.HasField("logprobs") else None,
        prompt_logprobs=_scores_to_wire(outputs[0].prompt),
        attention=first.attention if first.HasField("attention") else None,
        hidden_states=first.hidden_states if first.HasField("hidden_states") else None,
    )


def _choice_to_wire(index: int, output: Output, client: ClientRequest) -> inference_pb2.Choice:
    are_wanted = client.params.logprobs is not None  # else they served to choose the best
    return inference_pb2.Choice(
        index=index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=FINISH_TO_WIRE[output.end.finish],
        matched_stop=output.end.stop,
        logprobs=_scores_to_wire(output.scores) if are_wanted else None,
        **insight_to_wire(output.insight),
        answer=answer_to_wire(output.parts) if isinstance(client.prompts[0], ChatPrompt) else None,
    )


def _scores_to_wire(scores: Scores | None) -> inference_pb2.TokenLogprobs | None:
    return None if scores is None else logprobs_to_wire(scores.logprobs)


def _usage_to_wire(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        accepted_prediction_tokens=usage.predicted.accepted,
        rejected_prediction_tokens=usage.predicted.rejected,
        image_tokens=usage.image_tokens,
    )


def follow_from_wire(request: inference_pb2.GenerateRequest) -> Follow | None:
    """Return what it goes on behind as a turn of a session; None: it is none. Raises `InvalidRequest`."""
    if not request.HasField("session_params"):
        return None
    if max(request.n, request.best_of) > 1 or request.HasField("chat"):
        words = "a turn of a session has one prompt, of text or tokens, and one output"
        raise InvalidRequest(words, param="session_params")
    params = request.session_params
    if not 1 <= len(params.id) <= MAX_SESSION_ID_LEN:
        words = f"a session's name has 1 to {MAX_SESSION_ID_LEN} characters"
        raise InvalidRequest(words, param="session_params.id")
    if len(params.rid) > MAX_RID_LEN:
        raise InvalidRequest(f"a turn's name has at most {MAX_RID_LEN} characters", param="session_params.rid")
    return Follow(params.id, params.rid, params.offset, params.replace, params.drop_previous_output)


def wish_from_wire(request: inference_pb2.OpenSessionRequest) -> Wish:
    """Raises `InvalidRequest`."""
    bounds: Mapping[str, tuple[float, float, float]] = {
        "capacity_of_str_len": (request.capacity_of_str_len, 1, MAX_COUNT),
        "context_tokens": (request.context_tokens, 0, MAX_COUNT),
        "timeout": (request.timeout, 0, MAX_IDLE_S),
        "wait_s": (request.wait_s, 0, MAX_WAIT_S),
        "session_id": (len(request.session_id), 0, MAX_SESSION_ID_LEN),
    }
    for param, (value, least, most) in bounds.items():
        if not least <= value <= most:
            what = "characters of session_id" if param == "session_id" else param
            raise InvalidRequest(f"{what} must be {least} to {most:g}, not {value:g}", param=param)
    return Wish(
        request.capacity_of_str_len,
        request.session_id,
        request.timeout,
        request.wait_s,
        request.context_tokens,
        request.model,
    )


def prompt_to_tokenize(request: inference_pb2.TokenizeRequest) -> Prompt:
    """Raises `InvalidRequest` if there is none."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text, add_special_tokens=not request.no_special_tokens)
        case "chat":
            return chat_prompt(request.chat)
    raise InvalidRequest("no prompt: set text or chat", param="prompt")


def prompts_to_embed(request: inference_pb2.EmbedRequest) -> list[Prompt]:
    """Raises `InvalidRequest` for none, or for too many."""
    num_inputs = len(request.texts) + len(request.tokens)
    if not 1 <= num_inputs <= MAX_INPUTS:
        raise InvalidRequest(f"texts and tokens take 1 to {MAX_INPUTS} inputs, not {num_inputs}", param="texts")
    check_count("tokens", [token for each in request.tokens for token in each.ids], MAX_TOKENS)
    if not all(request.texts):
        raise InvalidRequest("a text is empty, and of nothing there is no vector: leave it out", param="texts")
    return [*map(TextPrompt, request.texts), *(TokenPrompt(list(each.ids)) for each in request.tokens)]


def pairs_to_score(request: inference_pb2.ScoreRequest) -> list[tuple[str, str]]:
    """Raises `InvalidRequest` for none, or for too many."""
    if not 1 <= len(request.documents) <= MAX_INPUTS:
        words = f"documents takes 1 to {MAX_INPUTS} texts, not {len(request.documents)}"
        raise InvalidRequest(words, param="documents")
    if not (request.query and all(request.documents)):
        raise InvalidRequest("the query or a document is empty: give a text", param="query")
    return [(request.query, document) for document in request.documents]


def vectors_from_wire(
    options: inference_pb2.VectorOptions, prompts: Sequence[Prompt], labels: tuple[int, ...], caller: Caller
) -> ClientRequest:
    """Return what is asked for. Raises `InvalidRequest`."""
    if options.truncate_prompt_tokens < -1:
        words = "truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes"
        raise InvalidRequest(words, param="truncate_prompt_tokens")
    return ClientRequest(
        model=options.model,
        prompts=prompts,
        params=SamplingParams(),
        max_tokens=1,
        account=Account(caller.name or options.tenant, options.priority),
        hints=hints_of(caller.cache_owner, options.cache_salt),
        caller=caller,
        vectors=PoolingParams(labels, options.truncate_prompt_tokens, options.truncate_left),
    )


async def add_vectors(response: inference_pb2.EmbedResponse, pooled: Sequence[Pooled]) -> None:
    """Put the vectors into the answer. They may be millions of numbers: others have their turn between two vectors."""
    async for each in in_turns(pooled):
        response.vectors.add().values.extend(each.vector.tolist())


def vector_usage_to_wire(pooled: Sequence[Pooled]) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=sum(each.prompt_tokens for each in pooled),
        cached_tokens=sum(each.cached_tokens for each in pooled),
    )


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "tokens":
            return TokenPrompt(list(request.tokens.ids))
        case "chat":
            return chat_prompt(request.chat)
        case "input_embeds":
            return rows_prompt(request.input_embeds)
    raise InvalidRequest("no prompt: set text, tokens, chat or input_embeds", param="prompt")


def rows_prompt(given: inference_pb2.InputEmbeds) -> RowsPrompt:
    """Raises `InvalidRequest`. The numbers are not looked at yet."""
    data = given.values  # each time it is asked for is a copy
    check_row_bytes(data, given.width)
    return RowsPrompt(data, given.width)


def chat_prompt(chat: ChatMessages) -> ChatPrompt:
    """Raises `InvalidRequest`."""
    if chat.continue_last and chat.messages and chat.messages[-1].role != "assistant":
        raise InvalidRequest("continue_last needs a last message of role 'assistant'", param="chat.continue_last")
    turns, images = without_images([_turn(message, f"chat.messages[{n}]") for n, message in enumerate(chat.messages)])
    return ChatPrompt(
        turns,
        () if _hides_tools(chat) else [_tool(tool) for tool in chat.tools],
        _object("template_parameters", chat.template_parameters or "{}"),
        chat.reasoning_effort or None,
        chat.continue_last,
        images,
    )


def tool_use_of(chat: ChatMessages) -> ToolUse:
    """Raises `InvalidRequest`."""
    functions, parallel = [Function(tool.name, _parameters(tool)) for tool in chat.tools], not chat.single_tool_call
    if chat.called_tool:
        return choose(functions, "named", [chat.called_tool], parallel=parallel)
    if chat.tool_choice not in _CHOICES:
        return NO_TOOLS
    return choose(functions, _CHOICES[chat.tool_choice], parallel=parallel)


def answer_to_wire(parts: Iterable[Part]) -> ChatAnswer:
    message = message_of(parts)
    calls = [ToolCall(id=call.call_id, name=call.name, arguments=call.arguments) for call in message.calls]
    return ChatAnswer(content=message.content, reasoning=message.reasoning, tool_calls=calls)


def part_to_wire(part: Part) -> ChatPart:
    match part:
        case Content(text):
            return ChatPart(content=text)
        case Reasoning(text):
            return ChatPart(reasoning=text)
        case ToolCallStart(index, call_id, name):
            return ChatPart(call_index=index, call_start=ToolCall(id=call_id, name=name))
        case ToolArguments(index, text):
            return ChatPart(call_index=index, call_arguments=text)


def _hides_tools(chat: ChatMessages) -> bool:
    return chat.tool_choice == inference_pb2.TOOL_CHOICE_NONE and not chat.called_tool


def _turn(message: ChatMessage, path: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": _content(message, path)}
    optional = {"tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning}
    turn |= {key: value for key, value in optional.items() if value}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _content(message: ChatMessage, path: str) -> Any:
    if not message.parts:
        return message.content
    if message.content:
        raise InvalidRequest(f"{path} has content and parts: give one of the two", param=f"{path}.parts")
    content = content_of([_part(part, f"{path}.parts") for part in message.parts])
    if not isinstance(content, str) and message.role not in ("user", "tool"):
        words = "may have images in a message of role 'user' or 'tool', and in no other"
        raise InvalidRequest(f"{path}.parts {words}", param=f"{path}.parts")
    return content


def _part(part: ContentPart, path: str) -> str | ImageInput:
    match part.WhichOneof("part"):
        case "text":
            return part.text
        case "image":
            return ImageInput(path, file=part.image, is_small=part.few_pixels)
        case "image_url":
            return image_at(part.image_url, path, is_small=part.few_pixels)
    raise InvalidRequest(f"{path}: a part is empty: set text, image or image_url", param=path)


def _call(call: ToolCall) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": _object("tool_calls.arguments", call.arguments or "{}")}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": _parameters(tool)}
    return {"type": "function", "function": function}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return _object("tools.parameters", tool.parameters) if tool.parameters else NO_ARGUMENTS


def _object(param: str, text: str) -> Mapping[str, Any]:
    try:
        value = from_json(text)  # takes no nesting that anybody after it could not take
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be the text of a JSON object", param=param)
    return value


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DiptychError) -> None:
    """End the call with the error's status. Raises."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded | Unavailable):
        metadata = (("retry-after", str(error.retry_after_s)),)
    await context.abort(grpc.StatusCode[error.grpc_status], str(error), metadata)
