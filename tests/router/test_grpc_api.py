from __future__ import annotations

import queue
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from diptych.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    SamplingParams,
    TokenIds,
    TokenizeRequest,
    Tool,
    ToolCall,
)

Cluster = Any
SCRIPT = "Zoë says: 你好 🙂!"


@pytest.fixture
def channel(cluster: Cluster) -> Iterator[grpc.Channel]:
    cluster.script = SCRIPT
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)


def test_generate(cluster: Cluster, stub: Any) -> None:
    token_ids = [*cluster.tokenizer.encode(SCRIPT), 256]
    assert stub.Generate(GenerateRequest(text="abc", request_id="r")) == inference_pb2.GenerateResponse(
        request_id="r",
        text=SCRIPT,
        token_ids=token_ids,
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=len(token_ids), cached_tokens=3),
        model="tiny",
    )


def test_a_stream_joined_is_the_whole(stub: Any) -> None:
    whole = stub.Generate(GenerateRequest(text="abc", model="tiny"))
    chunks = list(stub.GenerateStream(GenerateRequest(text="abc", model="tiny")))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert (chunks[-1].finish_reason, chunks[-1].usage) == (whole.finish_reason, whole.usage)
    assert {chunk.finish_reason for chunk in chunks[:-1]} <= {inference_pb2.FINISH_REASON_UNSPECIFIED}
    assert len({chunk.request_id for chunk in chunks}) == 1
    assert chunks[0].request_id


def test_a_busy_client_is_told_to_connect_anew_while_its_running_call_goes_on(start_cluster: Any, hang: Any) -> None:
    """Else it would keep to a router that drains."""
    cluster = start_cluster(1, 1, drain_s=6.0)  # a connection lives for a third of it
    cluster.script = SCRIPT
    cluster.decode().faults = [hang(1)]
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = stub.GenerateStream(GenerateRequest(text="abc"))
        first = next(running)
        channel.subscribe(states.put)
        while states.get(timeout=200) is not grpc.ChannelConnectivity.IDLE:
            pass
        cluster.decode().faults = []
        assert stub.Generate(GenerateRequest(text="abc")).text == SCRIPT
        cluster.release(cluster.decode())
        assert first.text + "".join(chunk.text for chunk in running) == SCRIPT


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"tokens": TokenIds(ids=[64, 65])}, "ab"),
        ({"chat": ChatMessages(messages=[ChatMessage(role="user", content="hi")])}, "<user>hi\n"),
    ],
)
def test_a_prompt_is_text_tokens_or_chat(cluster: Cluster, stub: Any, prompt: Any, text: str) -> None:
    stub.Generate(GenerateRequest(**prompt))
    assert list(cluster.prefill().started[0].prompt_token_ids) == cluster.tokenizer.encode(text)


def test_sampling_is_carried_through(cluster: Cluster, stub: Any) -> None:
    sampling = SamplingParams(
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=9,
        stop_token_ids=[7],
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={3: -1.5, 4: 100},
        min_tokens=2,
        logprobs=2,
    )
    response = stub.Generate(GenerateRequest(text="a", sampling=sampling))
    assert cluster.decode().started[0].sampling == sampling
    assert (len(response.token_ids), response.finish_reason) == (5, inference_pb2.FINISH_REASON_LENGTH)


def test_the_only_tokens_that_may_be_output_are_carried_through(cluster: Cluster, stub: Any) -> None:
    stub.Generate(GenerateRequest(text="a", sampling=SamplingParams(allowed_token_ids=[7, 9])))
    assert list(cluster.decode().started[0].sampling.allowed_token_ids) == [7, 9]


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_tokens_looked_at_is_told(cluster: Cluster, stub: Any, is_stream: bool) -> None:
    wish = inference_pb2.AttentionWish(top_k=2, layers=[3])
    request = GenerateRequest(text="a", sampling=SamplingParams(max_tokens=3, attention=wish))
    parts = list(stub.GenerateStream(request)) if is_stream else [stub.Generate(request)]
    assert cluster.decode().started[0].sampling.attention == wish
    assert [position for part in parts for position in part.attention.positions] == [0, -1, 1, -1, 2, -1]
    assert {layer for part in parts for layer in part.attention.layers} == {3}


@pytest.mark.parametrize("is_stream", [False, True])
def test_hidden_states_are_told(cluster: Cluster, stub: Any, is_stream: bool) -> None:
    """Nothing is said of the length of an output: it ends where no more can be told."""
    request = GenerateRequest(text="a", sampling=SamplingParams(hidden_states=True))
    parts = list(stub.GenerateStream(request)) if is_stream else [stub.Generate(request)]
    told = b"".join(part.hidden_states.values for part in parts)
    num_tokens = sum(len(part.token_ids) for part in parts)
    assert struct.unpack(f"<{2 * num_tokens}f", told) == tuple(x for i in range(num_tokens) for x in (i, 0.5))
    assert cluster.decode().started[-1].sampling.max_tokens == 512


def test_a_stop_string(stub: Any) -> None:
    response = stub.Generate(GenerateRequest(text="a", sampling=SamplingParams(stop=["says"])))
    assert (response.text, response.finish_reason) == ("Zoë ", inference_pb2.FINISH_REASON_STOP)
    assert response.matched_stop == "says"
    assert len(response.token_ids) == len("Zoë says".encode())


BAD = {
    "nothing": GenerateRequest(),
    "empty text": GenerateRequest(text=""),
    "no tokens": GenerateRequest(tokens=TokenIds()),
    "a token beyond the vocabulary": GenerateRequest(tokens=TokenIds(ids=[4_000_000])),
    "no messages": GenerateRequest(chat=ChatMessages()),
    "an unknown role": GenerateRequest(chat=ChatMessages(messages=[ChatMessage(role="wizard")])),
    "temperature": GenerateRequest(text="a", sampling=SamplingParams(temperature=-1)),
    "temperature that is no number": GenerateRequest(text="a", sampling=SamplingParams(temperature=float("nan"))),
    "max_tokens": GenerateRequest(text="a", sampling=SamplingParams(max_tokens=0)),
    "too long": GenerateRequest(text="a" * 2048),
    "an id of two lines": GenerateRequest(text="a", request_id="a\nb"),
    "a long id": GenerateRequest(text="a", request_id="a" * 129),
}


@pytest.mark.parametrize("request_", BAD.values(), ids=BAD.keys())
def test_bad_input_is_an_invalid_argument(cluster: Cluster, stub: Any, request_: GenerateRequest) -> None:
    with pytest.raises(grpc.RpcError) as whole:
        stub.Generate(request_)
    with pytest.raises(grpc.RpcError) as stream:
        list(stub.GenerateStream(request_))
    assert whole.value.code() is stream.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert whole.value.details()
    assert cluster.prefill().started == []


USER = ChatMessage(role="user", content="a")
CALLER = ChatMessage(role="assistant", tool_calls=[ToolCall()] * 1025)
TOO_MANY = {
    "chat.messages takes at most 4096, not 4097": GenerateRequest(chat=ChatMessages(messages=[USER] * 4097)),
    "chat.tools takes at most 128, not 129": GenerateRequest(
        chat=ChatMessages(messages=[USER], tools=[Tool(name="f")] * 129)
    ),
    "chat.messages[1].tool_calls takes at most 1024, not 1025": GenerateRequest(
        chat=ChatMessages(messages=[USER, CALLER])
    ),
    "stop takes at most 16, not 17": GenerateRequest(text="a", sampling=SamplingParams(stop=["a"] * 17)),
    "stop_token_ids takes at most 128, not 129": GenerateRequest(
        text="a", sampling=SamplingParams(stop_token_ids=[1] * 129)
    ),
    "tokens takes at most 1048576, not 1048577": GenerateRequest(tokens=TokenIds(ids=[1] * (2**20 + 1))),
    "the prompt has more than 2048 tokens, which is too many here: make it shorter": GenerateRequest(text="a" * 2**20),
}


@pytest.mark.parametrize(("words", "request_"), TOO_MANY.items(), ids=TOO_MANY.keys())
def test_too_much_is_refused_with_how_much_there_may_be(stub: Any, words: str, request_: GenerateRequest) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub.Generate(request_)
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, words)


def test_a_message_of_many_fields_is_refused_and_no_other(channel: grpc.Channel, stub: Any) -> None:
    generate = channel.unary_unary("/diptych.v1.Inference/Generate", None, None)
    with pytest.raises(grpc.RpcError) as error:
        generate(b"\x2a\x00" * 2**18)  # empty sampling parameters
    words = "the message holds too much: it may have at most 131072 fields and 65536 messages within it"
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.value.details()).startswith(words)
    assert stub.Generate(GenerateRequest(text="a")).text == SCRIPT


def test_metadata_is_bounded_and_its_call_alone_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub.Generate(GenerateRequest(text="a"), metadata=(("a", "x" * 2**20),))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.Generate(GenerateRequest(text="a")).text == SCRIPT


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (worker_pb2.ERROR_CODE_INVALID, grpc.StatusCode.INVALID_ARGUMENT),
        (worker_pb2.ERROR_CODE_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (worker_pb2.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL),
        (worker_pb2.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (worker_pb2.ERROR_CODE_PEER_LOST, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_workers_failure_becomes_a_status(
    cluster: Cluster, stub: Any, fail: Any, code: int, status: grpc.StatusCode
) -> None:
    cluster.decode().faults = [fail(0, code)] * 4
    with pytest.raises(grpc.RpcError) as error:
        stub.Generate(GenerateRequest(text="a"))
    assert (error.value.code(), error.value.details()) == (status, "decode: told to fail")


def test_an_unknown_model_is_not_found(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub.Generate(GenerateRequest(text="a", model="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_deadline_is_told_to_the_workers_and_ends_both_legs(cluster: Cluster, stub: Any, hang: Any) -> None:
    timeout_s = 0.15
    cluster.prefill().faults, cluster.decode().faults = [hang(1)] * 100, [hang(2)] * 100
    while not all(worker.started for worker in cluster.workers):  # in time: a busy machine may need more of it
        timeout_s *= 2
        with pytest.raises(grpc.RpcError) as error:
            stub.Generate(GenerateRequest(text="a"), timeout=timeout_s)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < cluster.prefill().started[0].timeout_ms <= timeout_s * 1000
    cluster.wait_for(lambda: all(worker.aborted for worker in cluster.workers))


def test_models_are_listed(stub: Any) -> None:
    models = stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert list(models) == [inference_pb2.Model(id="tiny", context_len=2048)]


def test_tokens_and_text_are_each_others_inverse(cluster: Cluster, stub: Any) -> None:
    made = stub.Tokenize(TokenizeRequest(text="Zoë"))
    assert (list(made.token_ids), made.context_len) == (cluster.tokenizer.encode("Zoë"), 2048)
    assert stub.Detokenize(DetokenizeRequest(token_ids=[*made.token_ids, 256])).text == "Zoë<eos>"


def test_an_answer_that_is_begun_is_continued(cluster: Cluster, stub: Any) -> None:
    turns = [ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="Well,")]
    tokens = stub.Tokenize(TokenizeRequest(chat=ChatMessages(messages=turns, continue_last=True))).token_ids
    assert cluster.tokenizer.decode(tokens) == "<user>hi\n<assistant>Well,"
    with pytest.raises(grpc.RpcError, match="role 'assistant'"):
        stub.Tokenize(TokenizeRequest(chat=ChatMessages(messages=turns[:1], continue_last=True)))


def test_a_chat_is_tokenised_as_it_is_served(cluster: Cluster, stub: Any) -> None:
    chat = ChatMessages(messages=[ChatMessage(role="user", content="hi")])
    stub.Generate(GenerateRequest(chat=chat))
    served = list(cluster.prefill().started[0].prompt_token_ids)
    assert list(stub.Tokenize(TokenizeRequest(chat=chat)).token_ids) == served


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Tokenize", TokenizeRequest()),
        ("Tokenize", TokenizeRequest(text="")),
        ("Detokenize", DetokenizeRequest(token_ids=[257])),
    ],
)
def test_tokens_of_nothing_are_an_invalid_argument(stub: Any, method: str, request_: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        getattr(stub, method)(request_)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_says_whether_a_pair_is_there(cluster: Cluster, channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)

    def is_serving(service: str) -> bool:
        status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    cluster.wait_until(lambda: is_serving("diptych.v1.Inference"))
    cluster.publish(cluster.prefill())
    cluster.wait_until(lambda: not is_serving("diptych.v1.Inference"))
    assert is_serving("")


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_names_the_services(channel: grpc.Channel, version: str) -> None:
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {"diptych.v1.Inference", "grpc.health.v1.Health"}


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zoë"}}</tool_call>'
CHAT = ChatMessages(
    messages=[ChatMessage(role="user", content="hi")], tools=[Tool(name="weather", parameters='{"type": "object"}')]
)


def test_a_chat_with_tools(cluster: Cluster, stub: Any) -> None:
    cluster.script = f"I look. {CALL}"
    response = stub.Generate(GenerateRequest(chat=CHAT))
    (call,) = response.answer.tool_calls
    assert (response.text, response.answer.content) == (cluster.script, "I look.")
    assert (call.name, call.arguments, len(call.id)) == ("weather", '{"city": "Zoë"}', 9)
    parts = [part for chunk in stub.GenerateStream(GenerateRequest(chat=CHAT)) for part in chunk.parts]
    (start,) = [part.call_start for part in parts if part.HasField("call_start")]
    assert start.name == "weather"
    assert "".join(part.call_arguments for part in parts) == '{"city": "Zoë"}'
    assert "".join(part.content for part in parts) == "I look."


@pytest.mark.integration
def test_a_chat_that_must_call(cluster: Cluster, stub: Any) -> None:
    cluster.script = '{"city": "Rome"}'
    chat = ChatMessages(called_tool="weather")
    chat.MergeFrom(CHAT)
    (call,) = stub.Generate(GenerateRequest(chat=chat)).answer.tool_calls
    assert (call.name, call.arguments) == ("weather", cluster.script)
    turns = [
        ChatMessage(role="assistant", tool_calls=[call]),
        ChatMessage(role="tool", tool_call_id=call.id, content="sunny"),
    ]
    stub.Generate(GenerateRequest(chat=ChatMessages(messages=turns)))
    sent = cluster.tokenizer.decode(cluster.decode().started[-1].prompt_token_ids)
    assert sent == (
        '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        "<user><tool_response>\nsunny\n</tool_response>\n"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"called_tool": "fly"}, "there is no tool 'fly'"),
        ({"tools": [Tool(name="x", parameters="7")]}, "tools.parameters must be the text of a JSON object"),
        ({"template_parameters": '{"mood": 1}'}, "no parameter 'mood'"),
        ({"tools": [Tool(name="weather")]}, "a name of its own"),
        ({"tools": [Tool(name="a/b")]}, "must match"),
        ({"tools": [Tool(name="x", parameters='{"a":' * 900 + "1" + "}" * 900)]}, "the text of a JSON object"),
    ],
)
def test_what_is_wrong_with_tools_is_named(stub: Any, fields: Any, words: str) -> None:
    chat = ChatMessages(**fields)
    chat.MergeFrom(CHAT)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(GenerateRequest(chat=chat))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (caught.value.details() or "")
