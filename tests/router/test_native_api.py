"""/generate, /tokenize and /detokenize."""

from __future__ import annotations

import http.client
import json
from typing import Any
from unittest.mock import ANY

import pytest

Cluster = Any
EOS = 256


@pytest.fixture(scope="module")
def shared(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    shared.script = "Hi!"
    return shared


def post(cluster: Cluster, path: str, **body: Any) -> Any:
    status, answer = cluster.post(path, body)
    assert status == 200, answer
    return answer


def test_text_in_text_and_tokens_out(cluster: Cluster) -> None:
    answer = post(cluster, "/generate", text="abc")
    assert answer.pop("meta_info") == {
        "id": ANY,
        "finish_reason": {"type": "stop", "matched": None},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 3,
    }
    assert answer == {"index": 0, "text": "Hi!", "output_ids": [*cluster.tokenizer.encode("Hi!"), EOS]}


def test_tokens_in_are_the_prompt(cluster: Cluster) -> None:
    post(cluster, "/generate", input_ids=[65, 66], sampling_params={"max_new_tokens": 2, "top_k": -1})
    leg = cluster.prefill().started[-1]
    assert (list(leg.prompt_token_ids), leg.sampling.max_tokens, leg.sampling.top_k) == ([65, 66], 2, 0)


@pytest.mark.parametrize("fields", [{"text": ["a", "b"]}, {"input_ids": [[1], [2]]}])
def test_several_prompts_are_answered_with_a_list(cluster: Cluster, fields: Any) -> None:
    answers = post(cluster, "/generate", **fields, sampling_params={"max_new_tokens": 1})
    assert [(answer["index"], answer["meta_info"]["finish_reason"]) for answer in answers] == [
        (0, {"type": "length", "length": 1}),
        (1, {"type": "length", "length": 1}),
    ]


def test_the_stop_string_is_named(cluster: Cluster) -> None:
    answer = post(cluster, "/generate", text="a", sampling_params={"stop": ["!", "i!"]})
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("H", {"type": "stop", "matched": "i!"})


def test_log_probabilities_of_prompt_and_output(cluster: Cluster) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}
    meta = post(cluster, "/generate", text="ab", sampling_params={"max_new_tokens": 1}, **fields)["meta_info"]
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [[64, "a"], [65, "b"]]
    assert (meta["input_token_logprobs"][0][0], meta["input_top_logprobs"][0]) == (None, None)
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[39, "H"]]
    assert [len(top) for top in meta["output_top_logprobs"]] == [1]


def test_an_event_of_a_stream_has_what_is_new(cluster: Cluster) -> None:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", "/generate", json.dumps({"text": "a", "stream": True}))
    *events, end = connection.getresponse().read().decode().strip().split("\n\n")
    connection.close()
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(part["text"] for part in parts) == "Hi!"
    assert [token for part in parts for token in part["output_ids"]] == [*cluster.tokenizer.encode("Hi!"), EOS]
    assert (parts[-1]["meta_info"]["completion_tokens"], end) == (4, "data: [DONE]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": [257]}, "prompt"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params"),
        ({"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ],
)
def test_what_contradicts_itself_is_refused(cluster: Cluster, fields: Any, param: str) -> None:
    status, answer = cluster.post("/generate", fields)
    assert (status, answer["error"]["param"]) == (400, param)


def test_tokens_and_text_are_each_others_inverse(cluster: Cluster) -> None:
    made = post(cluster, "/tokenize", prompt="Zoë 🙂", return_token_strs=True)
    assert (made["count"], made["max_model_len"]) == (len("Zoë 🙂".encode()), 2048)
    assert (made["tokens"], made["token_strs"][:2]) == (cluster.tokenizer.encode("Zoë 🙂"), ["Z", "o"])
    assert post(cluster, "/detokenize", tokens=[*made["tokens"], EOS]) == {"prompt": "Zoë 🙂<eos>"}


def test_messages_are_tokenised_as_a_chat_has_them(cluster: Cluster) -> None:
    chat: dict[str, Any] = {
        "messages": [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    }
    tokens = post(cluster, "/tokenize", **chat)["tokens"]
    post(cluster, "/v1/chat/completions", **chat)
    assert tokens == list(cluster.prefill().started[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a", "colour": "red"}),
        ("/detokenize", {"tokens": [257]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_tokens_of_nonsense_are_refused(cluster: Cluster, path: str, fields: Any) -> None:
    assert cluster.post(path, fields)[0] == 400


def test_workers_that_tokenise_leave_tokenize_to_the_router(start_cluster: Any) -> None:
    cluster = start_cluster(tokenize_at="worker")
    assert post(cluster, "/tokenize", prompt="ab")["tokens"] == cluster.tokenizer.encode("ab")
