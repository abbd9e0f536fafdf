"""What the API answers on the console's feed: chats as a stream, with calls of tools, JSON, and refusals. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

ANSWER: Final = "A diptych is two panels — joined by a hinge: one takes the prompt, the other gives the answer."
TOKEN_S: Final = 0.03
PROMPT_TOKENS: Final = 31

Json = dict[str, Any]


def refusal(body: Json, authorization: str) -> tuple[int, Json] | None:
    """Return the status and the body of an error, for the key `wrong` and for a temperature above 2."""
    if authorization == "Bearer wrong":
        return 401, _error("This API key is not known.", "invalid_api_key")
    if body.get("temperature", 0) > 2:
        return 400, _error("temperature must be from 0 to 2", None)
    return None


def _error(words: str, code: str | None) -> Json:
    return {"error": {"message": words, "type": "invalid_request_error", "param": None, "code": code}}


def chunks(body: Json) -> Iterator[Json]:
    """Yield the chunks of a stream: a call of the first tool; or JSON of the schema; or an answer.

    An answer to a prompt with "forever" goes on to `max_tokens`; one to "say: TEXT" is the text.
    """
    tools, output_format = body.get("tools"), body.get("response_format")
    if tools:
        deltas = list(_call(tools[0]["function"]))
    elif output_format:
        text = json.dumps(_example(output_format["json_schema"]["schema"]))
        deltas = [({"content": piece}, [piece]) for piece in _pieces(text)]
    else:
        deltas = [({"content": piece}, [piece]) for piece in _pieces(_said(body))[: body.get("max_tokens") or 99]]
    for index, (delta, tokens) in enumerate(deltas):
        yield _chunk(delta, [_entry(token, index + nth) for nth, token in enumerate(tokens)])
    yield _chunk({}, [], "tool_calls" if tools else "stop")
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": sum(len(tokens) for _, tokens in deltas)}
    yield {"choices": [], "usage": {**usage, "total_tokens": sum(usage.values())}}


def _said(body: Json) -> str:
    prompt = str(body["messages"][-1]["content"])
    if "forever" in prompt:
        return "and so on " * 1000
    return prompt.removeprefix("say: ") if prompt.startswith("say: ") else ANSWER


def _pieces(text: str) -> list[str]:
    return re.findall(r" ?[^ ]+| ", text)


def _call(function: Json) -> Iterator[tuple[Json, list[str]]]:
    arguments = json.dumps(_example(function.get("parameters", {})))
    head = {"id": "call_1", "type": "function", "function": {"name": function["name"], "arguments": ""}}
    yield {"tool_calls": [{"index": 0, **head}]}, ["<tool_call>"]
    for piece in _pieces(arguments):
        yield {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}, [piece]


def _example(schema: Json) -> Any:
    """Return something that a schema allows, if it is a simple one."""
    match schema.get("type"):
        case "object":
            return {name: _example(each) for name, each in schema.get("properties", {}).items()}
        case "integer" | "number":
            return 18
        case "array":
            return [_example(schema.get("items", {}))]
        case _:
            return "Paris"


def _entry(token: str, index: int) -> Json:
    logprob = -(0.02, 0.3, 1.2, 2.4, 4.1)[index % 5]
    top = [_scored(token, logprob), _scored(" or", -2.5), _scored(" and", -3.5)]
    return {**_scored(token, logprob), "top_logprobs": top}


def _scored(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _chunk(delta: Json, entries: list[Json], reason: str | None = None) -> Json:
    choice: Json = {"index": 0, "delta": delta, "finish_reason": reason}
    if entries:
        choice["logprobs"] = {"content": entries, "refusal": None}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "model", "choices": [choice]}
