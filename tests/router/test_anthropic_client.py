"""Anthropic's client, unchanged: what only workers that fail, and a model that says what it is told, can show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from diptych.v1 import worker_pb2

Cluster = Any
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster(max_body_bytes=100_000)


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    shared.script = "Hello!"
    return shared


@pytest.fixture
def client(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        yield client


def create(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "tiny", "max_tokens": 200, "messages": HELLO, **fields})


def stream(client: anthropic.Anthropic, **fields: Any) -> tuple[list[Any], Any]:
    """Return the events of a stream, and the message that they make."""
    with client.messages.stream(**{"model": "tiny", "max_tokens": 200, "messages": HELLO, **fields}) as running:
        return list(running), running.get_final_message()


def prompt_of(cluster: Cluster) -> str:
    return str(cluster.tokenizer.decode(cluster.prefill().started[-1].prompt_token_ids))


def test_words_and_calls_are_blocks_in_their_order(client: anthropic.Anthropic, cluster: Cluster) -> None:
    cluster.script = f"Let me look.\n{CALL}\n{CALL}"
    message = create(client, tools=[TOOL])
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[0].text.startswith("Let me look.")
    assert {(block.name, block.input["city"]) for block in message.content[1:]} == {("weather", "Zürich")}
    assert len({block.id for block in message.content[1:]}) == 2
    assert message.stop_reason == "tool_use"


def test_a_stream_opens_and_closes_each_block(client: anthropic.Anthropic, cluster: Cluster) -> None:
    cluster.script = f"Let me look.\n{CALL}"
    events, message = stream(client, tools=[TOOL])
    order = [event.type for event in events if event.type.startswith(("message", "content_block_st"))]
    assert order == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert (message.content[1].input, message.stop_reason) == ({"city": "Zürich"}, "tool_use")


def test_a_stream_tells_at_its_start_how_long_the_prompt_is(client: anthropic.Anthropic) -> None:
    events, message = stream(client)
    start = next(event for event in events if event.type == "message_start")
    assert start.message.usage.input_tokens == len("<user>hi\n")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (len("<user>hi\n") - 3, 3)


def test_a_call_that_is_cut_off_has_no_input(client: anthropic.Anthropic, cluster: Cluster) -> None:
    cluster.script = CALL
    message = create(client, tools=[TOOL], max_tokens=60)
    assert (message.stop_reason, [block.input for block in message.content if block.type == "tool_use"]) == (
        "max_tokens",
        [{}],
    )


def test_what_a_tool_answered_is_a_turn_of_its_own(client: anthropic.Anthropic, cluster: Cluster) -> None:
    cluster.script = CALL
    said = create(client, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": said.content[0].id, "content": [{"type": "text", "text": "rain"}]}
    turn = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
    create(client, messages=[*HELLO, said.to_param(), turn])
    assert prompt_of(cluster).endswith("</tool_call>\n<user><tool_response>\nrain\n</tool_response>\n<user>And?\n")


def test_words_of_the_assistant_at_the_end_begin_its_answer(client: anthropic.Anthropic, cluster: Cluster) -> None:
    create(client, messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(cluster) == "<user>hi\n<assistant>The answer is ("


def test_a_full_context_is_another_reason_than_the_limit(client: anthropic.Anthropic, cluster: Cluster) -> None:
    cluster.script = "x" * 3000
    long = [{"role": "user", "content": "y" * 2030}]
    assert create(client, messages=long, max_tokens=100).stop_reason == "model_context_window_exceeded"
    assert create(client, max_tokens=5).stop_reason == "max_tokens"


def test_sampling_and_who_asks_reach_the_workers(client: anthropic.Anthropic, cluster: Cluster) -> None:
    extra = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}  # older clients have arguments for them
    create(client, extra_body=extra, metadata={"user_id": "me"}, max_tokens=9)
    leg = cluster.prefill().started[-1]
    sampling = leg.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.25, 0.5, 7, 9)
    assert leg.tenant == "me"


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="be brief")
    usage = create(client, system="be brief").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("code", "error", "kind"),
    [
        (worker_pb2.ERROR_CODE_OVERLOADED, anthropic.RateLimitError, "rate_limit_error"),
        (worker_pb2.ERROR_CODE_PEER_LOST, anthropic.InternalServerError, "overloaded_error"),
        (worker_pb2.ERROR_CODE_INTERNAL, anthropic.InternalServerError, "api_error"),
        (worker_pb2.ERROR_CODE_DEADLINE, anthropic.InternalServerError, "timeout_error"),
    ],
)
def test_a_workers_failure_has_anthropics_words(
    client: anthropic.Anthropic, cluster: Cluster, fail: Any, code: int, error: Any, kind: str
) -> None:
    cluster.decode().faults = [fail(0, code)] * 4
    with pytest.raises(error) as raised:
        create(client)
    cluster.decode().faults = []
    assert raised.value.type == kind
    assert raised.value.request_id


def test_a_failure_in_the_middle_of_a_stream_is_an_event(
    client: anthropic.Anthropic, cluster: Cluster, fail: Any
) -> None:
    cluster.decode().faults = [fail(2, worker_pb2.ERROR_CODE_INTERNAL)]
    with pytest.raises(anthropic.APIStatusError) as raised:
        stream(client)
    error = {"type": "api_error", "message": "decode: told to fail"}
    assert raised.value.body == {"type": "error", "error": error}


def test_a_body_that_is_too_long_has_its_own_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.RequestTooLargeError):
        create(client, messages=[{"role": "user", "content": "x" * 200_000}])


def test_a_client_that_leaves_ends_both_legs(client: anthropic.Anthropic, cluster: Cluster, hang: Any) -> None:
    cluster.script, cluster.decode().faults = "x" * 500, [hang(10)]
    with client.messages.stream(model="tiny", max_tokens=500, messages=HELLO) as running:
        next(running.text_stream)
        room = cluster.decode().started[-1].room
    cluster.wait_for(lambda: room in cluster.decode().aborted)
