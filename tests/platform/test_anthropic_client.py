"""Anthropic's client, unchanged, against the real platform. The model is small: it uses tools where it must."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

Platform = Any
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
COUNT: list[Any] = [{"role": "user", "content": "Count: 1, 2, 3, 4, 5,"}]
GREEDY: dict[str, Any] = {"temperature": 0}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "weather", "description": "Weather of a city", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]


@pytest.fixture(scope="module")
def client(platform: Platform) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=platform.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: anthropic.Anthropic) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def create(client: anthropic.Anthropic, model: str) -> Any:
    def create(**fields: Any) -> Any:
        common = {"model": model, "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY}
        return client.messages.create(**{**common, **fields})

    return create


@pytest.fixture(scope="module")
def answer(create: Any) -> Any:
    """The answer to the question, to which others are compared."""
    return create()


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


def stream(client: anthropic.Anthropic, model: str, **fields: Any) -> tuple[list[Any], Any]:
    common = {"model": model, "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY}
    with client.messages.stream(**{**common, **fields}) as running:
        return list(running), running.get_final_message()


# answers


def test_a_question_is_answered(answer: Any) -> None:
    assert text_of(answer) == "The capital of France is Paris."


def test_a_message_says_what_it_is(answer: Any, model: str) -> None:
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", model)
    assert answer.id.startswith("msg_")


def test_an_answer_that_is_complete_ended_its_turn(answer: Any) -> None:
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


def test_each_message_has_an_id_of_its_own(create: Any, answer: Any) -> None:
    assert create().id != answer.id


def test_usage_counts_input_cache_and_output(create: Any) -> None:
    usage = [create().usage for _ in range(2)][-1]
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens > 0
    assert usage.output_tokens == 8


def test_the_limit_ends_an_answer(create: Any) -> None:
    message = create(max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens, text_of(message)) == ("max_tokens", 3, "The capital of")


def test_a_stop_sequence_ends_an_answer_and_is_named(create: Any) -> None:
    message = create(stop_sequences=[" nowhere", " France"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " France")
    assert text_of(message) == "The capital of"


# what may be sent


def test_content_may_be_blocks(create: Any, answer: Any) -> None:
    blocks = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    assert text_of(create(messages=[{"role": "user", "content": blocks}])) == text_of(answer)


def test_marks_for_the_cache_change_nothing(create: Any, answer: Any) -> None:
    block = {"type": "text", "text": QUESTION[0]["content"], "cache_control": {"type": "ephemeral"}}
    assert text_of(create(messages=[{"role": "user", "content": [block]}])) == text_of(answer)


@pytest.mark.parametrize("system", ["Be a pirate. " * 9, [{"type": "text", "text": "Be a pirate. "}] * 9])
def test_a_system_prompt_is_part_of_the_prompt(client: anthropic.Anthropic, model: str, system: Any) -> None:
    short = client.messages.count_tokens(model=model, messages=QUESTION, system="Be a pirate.")
    long = client.messages.count_tokens(model=model, messages=QUESTION, system=system)
    assert long.input_tokens - short.input_tokens > 8 * 3  # words


def test_an_answer_can_be_sent_back(create: Any, answer: Any) -> None:
    follow_up = {"role": "user", "content": "And of Germany?"}
    assert "Berlin" in text_of(create(messages=[*QUESTION, answer.to_param(), follow_up]))


def test_words_of_the_assistant_at_the_end_are_continued(create: Any) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France"}]
    assert text_of(create(messages=begun)) == " is Paris."


def test_sampling_may_be_random(create: Any) -> None:
    drawn = (text_of(create(extra_body={"temperature": 1.5, "top_p": 0.95, "top_k": 50})) for _ in range(100))
    first = next(drawn)
    assert any(text != first for text in drawn)  # the second one, nearly always


def test_who_asks_may_be_said(create: Any, answer: Any) -> None:
    assert text_of(create(metadata={"user_id": "somebody"})) == text_of(answer)


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
def test_thinking_changes_nothing_for_a_model_that_does_not_think(create: Any, answer: Any, thinking: Any) -> None:
    assert text_of(create(thinking=thinking)) == text_of(answer)


# streams


def test_a_stream_is_the_same_answer(client: anthropic.Anthropic, model: str, answer: Any) -> None:
    _, message = stream(client, model)
    assert (text_of(message), message.stop_reason) == (text_of(answer), answer.stop_reason)
    assert message.usage.output_tokens == answer.usage.output_tokens


def test_a_streams_events_have_their_order(client: anthropic.Anthropic, model: str) -> None:
    types = [event.type for event in stream(client, model)[0]]
    assert [types[0], *sorted(set(types[2:-3])), *types[-3:]] == [
        "message_start",
        "content_block_delta",
        "text",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_text_of_a_stream_comes_in_pieces(client: anthropic.Anthropic, model: str, create: Any) -> None:
    with client.messages.stream(model=model, max_tokens=50, messages=COUNT, extra_body=GREEDY) as running:
        pieces = list(running.text_stream)
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(create(messages=COUNT, max_tokens=50))


def test_raw_events_are_streamed_too(client: anthropic.Anthropic, model: str) -> None:
    events = client.messages.create(model=model, max_tokens=3, messages=QUESTION, stream=True, extra_body=GREEDY)
    last = [event for event in events if event.type == "message_delta"][-1]
    assert (last.delta.stop_reason, last.usage.output_tokens) == ("max_tokens", 3)


def test_a_stop_sequence_ends_a_stream_and_is_named(client: anthropic.Anthropic, model: str) -> None:
    _, message = stream(client, model, stop_sequences=[" France"])
    assert (text_of(message), message.stop_reason, message.stop_sequence) == (
        "The capital of",
        "stop_sequence",
        " France",
    )


def test_a_stream_that_is_left_frees_its_workers(platform: Platform, client: anthropic.Anthropic, model: str) -> None:
    with client.messages.stream(model=model, max_tokens=2000, messages=COUNT, extra_body=GREEDY) as running:
        next(running.text_stream)
    platform.assert_clean()


def test_the_asynchronous_client_does_the_same(platform: Platform, model: str, answer: Any) -> None:
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=platform.url, api_key="none", max_retries=0) as client:
            fields: Any = {"model": model, "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY}
            whole, other = await asyncio.gather(client.messages.create(**fields), client.messages.create(**fields))
            return [text_of(whole), text_of(other)]

    assert asyncio.run(ask()) == [text_of(answer)] * 2


# tools


def test_a_named_tool_is_used_with_valid_input(create: Any) -> None:
    message = create(tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, max_tokens=60)
    (use,) = message.content
    assert (use.type, use.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
    jsonschema.validate(use.input, CITY)


def test_any_tool_may_be_demanded(create: Any) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    (use,) = create(tools=TOOLS, tool_choice=choice, max_tokens=100).content
    assert use.type == "tool_use"
    assert use.name in ("weather", "now")


def test_a_tools_input_is_streamed_as_json(client: anthropic.Anthropic, model: str) -> None:
    choice = {"type": "tool", "name": "weather"}
    events, message = stream(client, model, tools=TOOLS, tool_choice=choice, max_tokens=60)
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(pieces)) == message.content[0].input
    jsonschema.validate(message.content[0].input, CITY)


def test_no_tool_is_used_where_none_may_be(create: Any, answer: Any) -> None:
    assert text_of(create(tools=TOOLS, tool_choice={"type": "none"})) == text_of(answer)


def test_tools_that_may_be_used_are_part_of_the_prompt(client: anthropic.Anthropic, model: str) -> None:
    without = client.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    assert client.messages.count_tokens(model=model, messages=QUESTION, tools=TOOLS).input_tokens > without + 50


def test_what_a_tool_answered_goes_into_the_conversation(create: Any) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    turns = [*QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert create(messages=turns, tools=TOOLS).usage.output_tokens > 0


def test_an_output_can_be_made_to_match_a_schema(create: Any) -> None:
    wanted = {"format": {"type": "json_schema", "schema": CITY}}
    jsonschema.validate(json.loads(text_of(create(output_config=wanted, max_tokens=60))), CITY)


# counting, models, errors


def test_counted_tokens_are_those_of_the_prompt(client: anthropic.Anthropic, model: str, answer: Any) -> None:
    counted = client.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_models_are_listed(client: anthropic.Anthropic, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_an_answer_has_its_requests_id(client: anthropic.Anthropic, model: str) -> None:
    headers = {"x-request-id": "mine"}
    message = client.messages.create(model=model, max_tokens=1, messages=QUESTION, extra_headers=headers)
    assert message._request_id == "mine"


def test_an_unknown_model_is_not_found(create: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        create(model="no-such-model")
    assert raised.value.type == "not_found_error"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].source"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"stop_sequences": [""]}, "stop"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "phone"}}, "phone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(create: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        create(**fields)
    assert raised.value.type == "invalid_request_error"
    assert words in str(raised.value)
