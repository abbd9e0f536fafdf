"""Log-probabilities, echo, and the best of several outputs, as the official client and gRPC see them.

The simulated model's log-probability of a token is minus a hundredth of its id; its likeliest tokens are 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from diptych.v1 import inference_pb2_grpc
from diptych.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds

Cluster = Any
CHAT: list[Any] = [{"role": "user", "content": "hi"}]
SCRIPT = "Zoë 🙂!"
EOS = 256


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    cluster.script = SCRIPT
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[Any]:
    cluster.script = SCRIPT
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def token_ids(cluster: Cluster, text: str) -> list[int]:
    ids: list[int] = cluster.tokenizer.encode(text)
    return ids


def near(values: Any) -> Any:
    return pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_log_probabilities_bytes_and_alternatives(
    client: openai.OpenAI, cluster: Cluster, stream: bool
) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny", messages=CHAT, logprobs=True, top_logprobs=2, stream=stream
    )
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    content = [entry for part in parts if part for entry in part.content]
    ids = [*token_ids(cluster, SCRIPT), EOS]
    assert [entry.logprob for entry in content] == near([-token_id / 100 for token_id in ids])
    assert b"".join(bytes(entry.bytes) for entry in content) == SCRIPT.encode() + b"<eos>"
    assert [entry.token for entry in content[:4]] == ["Z", "o", "\\xc3", "\\xab"]
    assert [[(top.token, top.logprob) for top in entry.top_logprobs] for entry in content] == [
        [("!", 0.0), ('"', near(-0.01))]
    ] * len(ids)


def test_nobody_gets_log_probabilities_unasked(client: openai.OpenAI, cluster: Cluster) -> None:
    assert client.chat.completions.create(model="tiny", messages=CHAT).choices[0].logprobs is None
    assert not cluster.decode().started[0].sampling.HasField("logprobs")
    answer = client.completions.create(model="tiny", prompt="p", best_of=2)
    assert answer.choices[0].logprobs is None
    assert cluster.decode().started[1].sampling.logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_log_probabilities_where_its_tokens_begin(
    client: openai.OpenAI, cluster: Cluster, stream: bool
) -> None:
    answer: Any = client.completions.create(model="tiny", prompt="p", logprobs=1, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    parts = [part for part in parts if part]
    ids = [*token_ids(cluster, SCRIPT), EOS]
    assert [value for part in parts for value in part.token_logprobs] == near([-token_id / 100 for token_id in ids])
    assert [at for part in parts for at in part.text_offset] == [0, 1, 2, 2, 3, 4, 4, 4, 4, 5, 6]
    tokens = [token for part in parts for token in part.tokens]
    assert tokens[:3] + tokens[-1:] == ["Z", "o", "\\xc3", "<eos>"]
    tops = [top for part in parts for top in part.top_logprobs]
    assert tops == [{token: near(-token_id / 100), "!": 0.0} for token, token_id in zip(tokens, ids, strict=True)]


def test_a_stop_string_ends_the_log_probabilities_too(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="tiny", prompt="p", logprobs=0, stop="oë").choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Z", "o", "\\xc3", "\\xab"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["né", [78, 12]])
def test_an_echo_begins_with_the_prompt(client: openai.OpenAI, cluster: Cluster, prompt: Any, stream: bool) -> None:
    text = prompt if isinstance(prompt, str) else cluster.tokenizer.decode(prompt)
    answer: Any = client.completions.create(model="tiny", prompt=prompt, echo=True, n=2, stream=stream)
    texts = ["", ""]
    for choice in [chunk.choices[0] for chunk in answer] if stream else answer.choices:
        texts[choice.index] += choice.text
    assert texts == [text + SCRIPT] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_prompt_is_scored_without_output(client: openai.OpenAI, stream: bool, num_choices: int) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client.completions.create(
        model="tiny", prompt="né", echo=True, logprobs=1, max_tokens=0, n=num_choices, **options
    )
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == num_choices - 1]
    assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == ("né", "length")
    (scores,) = [choice.logprobs for choice in choices if choice.logprobs]
    assert (scores.tokens, scores.text_offset) == (["n", "\\xc3", "\\xa9"], [0, 1, 1])
    assert (scores.token_logprobs[0], len(scores.token_logprobs), len(scores.top_logprobs)) == (None, 3, 3)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 0)


def test_prompts_are_scored_without_an_echo_too(client: openai.OpenAI) -> None:
    extra: Any = {"prompt_logprobs": 0}
    (choice,) = client.completions.create(model="tiny", prompt="né", max_tokens=0, extra_body=extra).choices
    assert (choice.text, len(choice.model_extra["prompt_logprobs"])) == ("", 3)  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_log_probabilities_of_the_prompt(client: openai.OpenAI, cluster: Cluster, stream: bool) -> None:
    answer: Any = client.completions.create(
        model="tiny", prompt="né", echo=True, logprobs=1, max_tokens=2, stream=stream
    )
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    parts = [part for part in parts if part]
    others = token_ids(cluster, "néZo")[1:]
    values = [value for part in parts for value in part.token_logprobs]
    assert (values[0], values[1:]) == (None, near([-token_id / 100 for token_id in others]))
    assert [token for part in parts for token in part.tokens] == ["n", "\\xc3", "\\xa9", "Z", "o"]
    assert [at for part in parts for at in part.text_offset] == [0, 1, 1, 2, 3]
    assert parts[0].top_logprobs[0] is None
    assert cluster.prefill().started[0].sampling.HasField("prompt_logprobs")
    assert not cluster.decode().started[0].sampling.HasField("prompt_logprobs")


def test_prompt_logprobs_are_told_as_vllm_does(client: openai.OpenAI, cluster: Cluster) -> None:
    extra = {"prompt_logprobs": 1}
    second = token_ids(cluster, "ab")[1]
    listed = [None, {str(second): {"logprob": near(-second / 100), "decoded_token": "b"}, "0": _zero()}]
    completion = client.completions.create(model="tiny", prompt="ab", extra_body=extra)
    assert completion.choices[0].model_extra == {"prompt_logprobs": listed, "stop_reason": None}
    chat = client.chat.completions.create(model="tiny", messages=CHAT, extra_body=extra)
    assert chat.model_extra is not None
    assert len(chat.model_extra["prompt_logprobs"]) == len("<user>hi\n")


def _zero() -> dict[str, Any]:
    return {"logprob": 0.0, "decoded_token": "!"}


def test_the_best_outputs_are_those_likeliest_by_token(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = None
    fields: Any = {"model": "tiny", "prompt": ["p", "q"], "seed": 3, "max_tokens": 6}
    every = client.completions.create(**fields, n=5, logprobs=0)
    best = client.completions.create(**fields, n=2, best_of=5)
    texts = []
    for prompt in range(2):
        made = every.choices[5 * prompt : 5 * prompt + 5]
        ranked = sorted(made, key=lambda choice: -sum(_values(choice)))
        texts += [choice.text for choice in ranked[:2]]
    assert [choice.text for choice in best.choices] == texts
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage is not None
    assert (best.usage.prompt_tokens, best.usage.completion_tokens) == (2, 60)


def _values(choice: Any) -> list[float]:
    return list(choice.logprobs.token_logprobs)


def test_a_replay_goes_on_with_log_probabilities(client: openai.OpenAI, cluster: Cluster, fail: Any) -> None:
    """Decode dies after three tokens; the next attempt continues, and asks for the prompt's no more."""
    cluster.decode().faults.append(fail(2, 7))
    cluster.decode().step_s = 0.02  # prefill says the first token before
    answer = client.completions.create(model="tiny", prompt="né", echo=True, logprobs=0, extra_body={"min_tokens": 5})
    assert answer.choices[0].logprobs is not None
    values = answer.choices[0].logprobs.token_logprobs
    ids = [*token_ids(cluster, "né" + SCRIPT), EOS]
    assert values is not None
    assert values[0] is None
    assert values[1:] == near([-token_id / 100 for token_id in ids[1:]])
    first, second = cluster.prefill().started
    assert [leg.sampling.HasField("prompt_logprobs") for leg in (first, second)] == [True, False]
    assert (first.num_prior_output_tokens, first.sampling.min_tokens) == (0, 5)
    assert second.num_prior_output_tokens + second.sampling.min_tokens == 5


def test_cache_salt_goes_to_both_legs(client: openai.OpenAI, cluster: Cluster) -> None:
    client.completions.create(model="tiny", prompt="p", extra_body={"cache_salt": "séc"})
    assert [worker.started[0].cache_salt for worker in cluster.workers] == ["séc".encode()] * 2


def test_grpc_tells_several_outputs_and_their_log_probabilities(stub: Any, cluster: Cluster) -> None:
    cluster.script = None
    sampling = SamplingParams(max_tokens=3, seed=1, logprobs=1, prompt_logprobs=2)
    request = GenerateRequest(tokens=TokenIds(ids=[64, 65, 66]), sampling=sampling, n=3)
    response = stub.Generate(request)
    outputs = [response, *response.more_choices]
    assert [choice.index for choice in response.more_choices] == [1, 2]
    assert list(response.prompt_logprobs.logprobs) == near([-0.65, -0.66])
    assert (response.prompt_logprobs.num_top, list(response.prompt_logprobs.top_ids)) == (2, [0, 1, 0, 1])
    for output in outputs:
        assert list(output.logprobs.logprobs) == near([-token_id / 100 for token_id in output.token_ids])
    assert len({output.text for output in outputs}) == 3
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 9)


def test_a_grpc_stream_of_several_outputs_equals_the_whole(stub: Any, cluster: Cluster) -> None:
    cluster.script = None
    sampling = SamplingParams(max_tokens=5, seed=1, logprobs=0)
    request = GenerateRequest(text="abc", sampling=sampling, n=2, echo=True)
    whole = stub.Generate(request)
    texts, logprobs = ["", ""], [[], []]  # type: tuple[list[str], list[list[float]]]
    for chunk in stub.GenerateStream(request):
        texts[chunk.index] += chunk.text
        logprobs[chunk.index] += chunk.logprobs.logprobs
    assert texts == [whole.text, whole.more_choices[0].text]
    assert all(text.startswith("abc") for text in texts)
    assert logprobs == [list(whole.logprobs.logprobs), list(whole.more_choices[0].logprobs.logprobs)]


def test_grpc_chooses_the_best_but_not_in_a_stream(stub: Any, cluster: Cluster) -> None:
    cluster.script = None
    sampling = SamplingParams(max_tokens=4, seed=1)
    response = stub.Generate(GenerateRequest(text="a", sampling=sampling, best_of=4))
    every = stub.Generate(GenerateRequest(text="a", sampling=SamplingParams(max_tokens=4, seed=1, logprobs=0), n=4))
    outputs = [every, *every.more_choices]
    assert response.text == max(outputs, key=lambda output: sum(output.logprobs.logprobs)).text
    assert not response.HasField("logprobs")
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.GenerateStream(GenerateRequest(text="a", best_of=4)))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_pathological_stop_expression_is_searched_for_like_any_other(client: openai.OpenAI, cluster: Cluster) -> None:
    cluster.script = "a" * 300
    extra = {"stop_regex": ["(a|aa)+b", "(a+)+[^a]b"]}
    answer = client.completions.create(model="tiny", prompt="p", max_tokens=300, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a" * 300, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_expression_ends_the_text_and_both_legs(
    client: openai.OpenAI, cluster: Cluster, stream: bool, hang: Any
) -> None:
    cluster.script = "one two three " * 20
    cluster.decode().faults = [hang(40)]  # it has not ended when it is told to
    extra = {"stop_regex": [r" th\w+e", "never"], "min_tokens": 3}
    answer: Any = client.completions.create(model="tiny", prompt="p", stream=stream, extra_body=extra)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == "one two"
    assert choices[-1].finish_reason == "stop"
    cluster.wait_for(lambda: cluster.decode().aborted and not cluster.decode().running)
