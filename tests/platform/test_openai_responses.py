"""The official client's responses against the real platform."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai

QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


def create(client: openai.OpenAI, **fields: Any) -> Any:
    common = {"model": "", "input": QUESTION, "temperature": 0, "max_output_tokens": 60}
    return client.responses.create(**{**common, **fields})


def test_a_question_is_answered(openai_client: openai.OpenAI) -> None:
    response = create(openai_client)
    assert (response.status, response.output_text, response.usage.output_tokens) == ("completed", PARIS, 8)


def test_a_stream_is_the_same_response(openai_client: openai.OpenAI) -> None:
    events = list(create(openai_client, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == events[-1].response.output_text == PARIS
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_conversation_goes_on_with_what_was_said(openai_client: openai.OpenAI) -> None:
    said = create(openai_client).output[0].model_dump(exclude_none=True)
    turns = [{"role": "user", "content": QUESTION}, said, {"role": "user", "content": "And of Germany?"}]
    assert "Berlin" in create(openai_client, input=turns).output_text


def test_an_output_can_be_made_to_match_a_schema(openai_client: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    jsonschema.validate(json.loads(create(openai_client, text=wanted).output_text), CITY)


def test_a_named_function_is_called_with_valid_arguments(openai_client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "weather"}
    (call,) = create(openai_client, tools=[TOOL], tool_choice=choice).output
    assert (call.type, call.name) == ("function_call", "weather")
    jsonschema.validate(json.loads(call.arguments), CITY)


def test_a_limit_leaves_the_response_incomplete(openai_client: openai.OpenAI) -> None:
    response = create(openai_client, max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "The capital of")
