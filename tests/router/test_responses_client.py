"""OpenAI's client, unchanged, asking for responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from diptych.v1 import worker_pb2

Cluster = Any
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    shared.script = "Hello!"
    return shared


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "hi", **fields})


def prompt_of(cluster: Cluster) -> str:
    return str(cluster.tokenizer.decode(cluster.prefill().started[-1].prompt_token_ids))


def test_text_is_answered_with_a_message(client: openai.OpenAI, cluster: Cluster) -> None:
    response = create(client, instructions="be brief")
    assert (response.object, response.status, response.output_text) == ("response", "completed", "Hello!")
    assert [(item.type, item.status, item.role) for item in response.output] == [("message", "completed", "assistant")]
    assert prompt_of(cluster) == "<system>be brief\n<user>hi\n"


def test_usage_is_counted(client: openai.OpenAI) -> None:
    usage = create(client).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (9, 7, 16)
    assert usage.input_tokens_details.cached_tokens == 3


def test_the_response_repeats_what_was_asked(client: openai.OpenAI) -> None:
    response = create(client, max_output_tokens=50, metadata={"a": "b"}, tools=[TOOL], tool_choice="none", top_p=0.5)
    assert (response.max_output_tokens, response.metadata, response.top_p) == (50, {"a": "b"}, 0.5)
    assert ([tool.name for tool in response.tools], response.tool_choice) == (["weather"], "none")
    assert (response.previous_response_id, response.error) == (None, None)


def test_how_tokens_are_chosen_reaches_the_workers(client: openai.OpenAI, cluster: Cluster) -> None:
    create(client, temperature=0.5, extra_body={"top_k": 7, "seed": 5})
    sampling = cluster.prefill().started[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 5)
    create(client, extra_body={"top_k": -1, "seed": None})
    assert cluster.prefill().started[-1].sampling.top_k == 0


def test_an_output_ends_where_clients_of_vllm_say(client: openai.OpenAI, cluster: Cluster) -> None:
    response = create(client, extra_body={"stop": "lo", "ignore_eos": True})
    assert (response.status, response.output_text) == ("completed", "Hel")
    assert cluster.prefill().started[-1].sampling.ignore_eos


def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    response = create(client, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["incomplete"]


def test_the_events_of_a_stream(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True))
    kinds = [event.type for event in events]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello!"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[-1].response.output_text, events[-1].response.usage.output_tokens) == ("Hello!", 7)


def test_the_clients_stream_helper_makes_the_same_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi") as running:
        final = running.get_final_response()
    assert (final.output_text, final.status) == ("Hello!", "completed")


def test_a_stream_that_is_cut_off_ends_incomplete(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True, max_output_tokens=3))
    assert events[-1].type == "response.incomplete"
    assert [event.item.status for event in events if event.type == "response.output_item.done"] == ["incomplete"]


def test_log_probabilities_stand_beside_the_text(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = "Zoë!"
    response = create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert bytes(byte for entry in logprobs for byte in entry.bytes).decode() == "Zoë!"
    assert {len(entry.top_logprobs) for entry in logprobs} == {2}


def test_each_log_probability_comes_with_its_text(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = "Zoë!"
    events = list(create(client, include=["message.output_text.logprobs"], stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    for delta in deltas:
        assert bytes(byte for entry in delta.logprobs for byte in entry.bytes).decode() == delta.delta
    told = [entry.token for delta in deltas for entry in delta.logprobs]
    assert told == [entry.token for entry in done.logprobs] == ["Z", "o", "\\xc3", "\\xab", "!"]
    assert [entry.token for entry in events[-1].response.output[0].content[0].logprobs] == told


def test_what_a_response_is_cut_off_in_is_incomplete(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = f"hi {CALL}"
    fields: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 60}
    events = list(create(client, stream=True, **fields))
    told = [(e.item.type, e.item.status) for e in events if e.type == "response.output_item.done"]
    assert told == [("message", "completed"), ("function_call", "incomplete")]
    for response in (events[-1].response, create(client, **fields)):
        assert [(item.type, item.status) for item in response.output] == told


def test_a_call_is_an_item(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = CALL
    (item,) = create(client, tools=[TOOL]).output
    assert (item.type, item.name, item.status) == ("function_call", "weather", "completed")
    assert item.arguments.replace(" ", "") == '{"city":"Oslo"}'


def test_a_calls_arguments_are_streamed(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = CALL
    events = list(create(client, tools=[TOOL], stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    (item,) = events[-1].response.output
    assert "".join(pieces) == done.arguments == item.arguments
    assert done.item_id == item.id


def test_the_conversation_comes_back_as_items(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = CALL
    said = create(client, tools=[TOOL]).output
    result = {"type": "function_call_output", "call_id": said[0].call_id, "output": "rain"}
    asked: list[Any] = [
        {"role": "user", "content": "hi"},
        *(item.model_dump(exclude_none=True) for item in said),
        result,
    ]
    create(client, input=asked)
    assert prompt_of(cluster).endswith("</tool_call>\n<user><tool_response>\nrain\n</tool_response>\n")


def test_what_the_model_said_can_be_sent_back(client: openai.OpenAI, cluster: Cluster) -> None:
    said = create(client).output[0].model_dump(exclude_none=True)
    create(client, input=[{"role": "developer", "content": "be kind"}, said, {"role": "user", "content": "and?"}])
    assert prompt_of(cluster) == "<system>be kind\n<assistant>Hello!\n<user>and?\n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"extra_body": {"conversation": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "phone"}}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [TOOL], "include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [TOOL], "tool_choice": "required", "top_logprobs": 1}, "include"),
        ({"tools": [{**TOOL, "parameters": {"minimum": 10**30}}]}, None),
    ],
)
def test_what_is_not_possible_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, **fields)
    assert raised.value.param == param


def test_a_failure_in_the_middle_of_a_stream_ends_the_response(
    client: openai.OpenAI, cluster: Cluster, fail: Any
) -> None:
    cluster.decode().faults = [fail(2, worker_pb2.ERROR_CODE_INTERNAL)]
    last = list(create(client, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("internal_error", "decode: told to fail")
