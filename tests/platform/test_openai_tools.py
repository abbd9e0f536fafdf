"""The official client's tools against the real platform. The model is small: calls are real where they must be made."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 12}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    common = {"model": "", "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    return client.chat.completions.create(**{**common, **fields})


def check_call(call: Any) -> None:
    schema = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}[call.function.name]
    jsonschema.validate(json.loads(call.function.arguments), schema)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_named_function_is_called_with_valid_arguments(openai_client: openai.OpenAI, temperature: float) -> None:
    choice = ask(openai_client, tool_choice=NAMED, temperature=temperature, seed=1).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, choice.finish_reason) == ("function", "weather", "stop")
    check_call(call)


def test_a_required_call_is_made(openai_client: openai.OpenAI) -> None:
    choice = ask(openai_client, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    check_call(call)


def test_required_calls_may_be_several(openai_client: openai.OpenAI) -> None:
    choice = ask(openai_client, tool_choice="required", temperature=1.2, seed=5, max_tokens=200).choices[0]
    assert 1 <= len(choice.message.tool_calls) <= 16
    if choice.finish_reason == "tool_calls":
        for call in choice.message.tool_calls:
            check_call(call)


def test_an_allowed_tool_is_called(openai_client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    choice = ask(openai_client, tool_choice=allowed, parallel_tool_calls=False).choices[0]
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [("now", "{}")]


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_streamed_call_is_the_same(openai_client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = ask(openai_client, **fields).choices[0].message.tool_calls
    chunks = list(ask(openai_client, **fields, stream=True))
    first, *others = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (first.function.name, first.function.arguments) == (whole.function.name, "")
    assert len(others) > 1
    assert "".join(call.function.arguments for call in others) == whole.function.arguments


def test_the_clients_own_stream_helper_joins_the_arguments(openai_client: openai.OpenAI, openai_model: str) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0, "max_tokens": 120}
    with openai_client.chat.completions.stream(model=openai_model, messages=QUESTION, **fields) as stream:
        kinds = {event.type for event in stream}
        calls: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    check_call(calls[0])


def test_a_call_cut_off_ends_with_length(openai_client: openai.OpenAI) -> None:
    choice = ask(openai_client, tool_choice=NAMED, max_tokens=3).choices[0]
    assert choice.finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(choice.message.tool_calls[0].function.arguments)


def test_each_choice_has_calls_of_its_own(openai_client: openai.OpenAI) -> None:
    choices = ask(openai_client, tool_choice=NAMED, n=2, temperature=1.5, seed=2).choices
    calls = [choice.message.tool_calls[0] for choice in choices]
    assert calls[0].id != calls[1].id
    for call in calls:
        check_call(call)


def test_the_result_of_a_call_goes_back(openai_client: openai.OpenAI) -> None:
    message = ask(openai_client, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is sunny in Paris."}
    answer = ask(openai_client, messages=[*QUESTION, message, result], tool_choice="none", max_tokens=30)
    assert "sunny" in answer.choices[0].message.content


def test_tools_that_may_be_called_are_in_the_prompt_and_others_are_not(openai_client: openai.OpenAI) -> None:
    without, none, auto = (
        ask(openai_client, max_tokens=1, **fields).usage.prompt_tokens
        for fields in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}, {"tool_choice": "auto"})
    )
    assert without == none < auto


def test_with_a_choice_of_its_own_the_model_answers_somehow(openai_client: openai.OpenAI) -> None:
    choice = ask(openai_client, max_tokens=40).choices[0]
    assert choice.message.content or choice.message.tool_calls


def test_calls_have_scores_and_usage(openai_client: openai.OpenAI) -> None:
    answer = ask(openai_client, tool_choice=NAMED, logprobs=True)
    scored = "".join(entry.token for entry in answer.choices[0].logprobs.content)
    assert scored == answer.choices[0].message.tool_calls[0].function.arguments
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)


class Person(BaseModel):
    """A shape of answers."""

    name: Annotated[str, Field(max_length=20)]
    kind: Literal["queen", "king"]


def test_a_tool_made_of_a_class_is_read_back_into_it(openai_client: openai.OpenAI, openai_model: str) -> None:
    tool = openai.pydantic_function_tool(Person, name="person")
    completion = openai_client.chat.completions.parse(
        model=openai_model,
        messages=[{"role": "user", "content": "Name a queen."}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "person"}},
        max_tokens=100,
        temperature=0,
    )
    choice = completion.choices[0]
    assert choice.message.tool_calls
    parsed = choice.message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, Person)


def test_a_tool_that_does_not_exist_can_not_be_chosen(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, tool_choice={"type": "function", "function": {"name": "fly"}})
    assert (caught.value.param, "fly" in caught.value.message) == ("tool_choice", True)


def test_arguments_that_can_not_be_promised_are_refused(openai_client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, tools=[tool], tool_choice="required")
    assert caught.value.param == "tools"
