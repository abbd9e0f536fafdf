"""/generate, /tokenize and /detokenize."""

from __future__ import annotations

import http.client
import json
from copy import deepcopy
from typing import Any
from unittest.mock import ANY

import pytest

from diptych.generation.finish import Finish
from diptych.router.http.native.generate_layout import TOLD_AGAIN, GenerateLayout, GenerateStyle
from diptych.router.values.output import End, Piece, Usage

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
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 3,
    }
    assert answer == {"index": 0, "text": "Hi!", "output_ids": [*cluster.tokenizer.encode("Hi!"), EOS]}


def test_tokens_in_are_the_prompt(cluster: Cluster) -> None:
    post(cluster, "/generate", input_ids=[65, 66], sampling_params={"max_new_tokens": 2, "top_k": -1})
    leg = cluster.prefill().started[-1]
    assert (list(leg.prompt_token_ids), leg.sampling.max_tokens, leg.sampling.top_k) == ([65, 66], 2, 0)


@pytest.mark.parametrize("sampling_params", [None, {}, {"max_new_tokens": None}])
def test_an_output_has_128_tokens_unless_it_is_said(cluster: Cluster, sampling_params: Any) -> None:
    post(cluster, "/generate", text="ab", sampling_params=sampling_params)
    assert cluster.prefill().started[-1].sampling.max_tokens == 128


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


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_are_named_whose_log_probabilities_each_output_token_has(cluster: Cluster, is_stream: bool) -> None:
    cluster.script = "Hi!"
    body: Any = {"text": "a", "return_logprob": True, "token_ids_logprob": [65, 3]}
    answer = stream(cluster, **body)[-1] if is_stream else post(cluster, "/generate", **body)
    named = answer["meta_info"]["output_token_ids_logprobs"]
    assert [[entry[1:] for entry in each] for each in named] == [[[65, "b"], [3, "$"]]] * len(answer["output_ids"])
    assert named[0][0][0] == pytest.approx(-0.65)


def test_a_processor_is_named_with_what_it_is_called_with(cluster: Cluster) -> None:
    said = {"custom_logit_processor": "mine", "custom_params": {"a": [1]}}
    post(cluster, "/generate", text="a", custom_logit_processor="mine", sampling_params={"custom_params": {"a": [1]}})
    assert cluster.post("/v1/completions", {"prompt": "a", **said})[0] == 200
    assert cluster.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **said})[0] == 200
    named = [started.sampling.processor for started in cluster.prefill().started[-3:]]
    assert [(each.name, json.loads(each.params)) for each in named] == [("mine", {"a": [1]})] * 3


@pytest.mark.parametrize(("start", "scored"), [(1, [65, 66]), (2, [66]), (9, [])])
def test_log_probabilities_of_a_prompt_may_begin_in_it(cluster: Cluster, start: int, scored: list[int]) -> None:
    fields = {"return_logprob": True, "logprob_start_len": start, "rid": "mine"}
    meta = post(cluster, "/generate", text="abc", sampling_params={"max_new_tokens": 1}, **fields)["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == scored
    assert [entry[0] is None for entry in meta["input_token_logprobs"]] == [True, False][: len(scored)]
    assert (len(meta["input_top_logprobs"]), meta["id"]) == (len(scored), "mine")


ATTENTION: Any = {"return_attention_tokens": True, "top_k_attention": 3, "attention_layers": [2, 5]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_each_output_token_looked_at(cluster: Cluster, is_stream: bool) -> None:
    body: Any = {"text": "ab", **ATTENTION, "attention_window": 9}
    answer = stream(cluster, **body)[-1] if is_stream else post(cluster, "/generate", **body)
    assert answer["meta_info"]["attention_tokens"] == [
        [{"layer": layer, "token_positions": [index], "attention_scores": [0.5]} for layer in (2, 5)]
        for index in range(len(answer["output_ids"]))
    ]
    for side in (cluster.prefill(), cluster.decode()):
        wish = side.started[-1].sampling.attention
        assert (wish.top_k, list(wish.layers), wish.window) == (3, [2, 5], 9)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_openai_s_answers_tell_it_too(cluster: Cluster, path: str, is_stream: bool) -> None:
    prompt: Any = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    fields = {**prompt, "return_attention_tokens": True, "return_token_ids": True, "max_tokens": 3}
    parts = stream(cluster, path, **fields) if is_stream else [post(cluster, path, **fields)]
    choices = [part["choices"][0] for part in parts]
    told = [entry for choice in choices for entry in choice.get("attention_tokens", [])]
    assert [[each["token_positions"] for each in token] for token in told] == [[[0]], [[1]], [[2]]]
    assert [len(each.get("attention_tokens", [])) for each in choices] == [
        len(each.get("token_ids", [])) for each in choices
    ]


def test_a_stop_string_ends_what_is_told_of_attention(cluster: Cluster) -> None:
    answer = post(cluster, "/generate", text="a", sampling_params={"stop": "i"}, return_attention_tokens=True)
    assert len(answer["meta_info"]["attention_tokens"]) == len(answer["output_ids"]) == 2


def test_nobody_hears_of_attention_unasked(cluster: Cluster) -> None:
    assert "attention_tokens" not in post(cluster, "/generate", text="ab", return_attention_tokens=False)["meta_info"]
    assert not cluster.decode().started[-1].sampling.HasField("attention")


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_hidden_state_of_each_output_token(cluster: Cluster, is_stream: bool) -> None:
    body: Any = {"text": "ab", "return_hidden_states": True, "incremental_streaming_output": True}
    parts = stream(cluster, **body) if is_stream else [post(cluster, "/generate", **body)]
    told = [row for part in parts for row in part["meta_info"].get("hidden_states", [])]
    assert told == [[index, 0.5] for index in range(4)]
    assert [each.started[-1].sampling.hidden_states for each in (cluster.prefill(), cluster.decode())] == [True] * 2
    assert "hidden_states" not in post(cluster, "/generate", text="ab", return_hidden_states=False)["meta_info"]


BAD_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"return_hidden_states": "yes"}, "return_hidden_states"),
    "sent again and again": ({"stream": True}, "needs incremental_streaming_output"),
    "too many": ({"sampling_params": {"max_new_tokens": 257, "n": 2}}, "not 1024 * 257 * 2 = 526336"),
}


@pytest.mark.parametrize(("fields", "words"), BAD_STATES.values(), ids=BAD_STATES)
def test_hidden_states_that_can_not_be_told_are_refused(cluster: Cluster, fields: Any, words: str) -> None:
    status, answer = cluster.post("/generate", {"text": "a", "return_hidden_states": True, **fields})
    assert status == 400
    assert words in json.dumps(answer)


BAD_ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "how, but not that": ({"top_k_attention": 2}, "top_k_attention"),
    "nothing": ({**ATTENTION, "top_k_attention": 0}, "top_k_attention"),
    "too many tokens": ({**ATTENTION, "top_k_attention": 33}, "top_k_attention"),
    "too many layers": ({**ATTENTION, "attention_layers": [*range(9)]}, "attention_layers"),
    "no layers": ({**ATTENTION, "attention_layers": []}, "attention_layers"),
    "a layer twice": ({**ATTENTION, "attention_layers": [1, 1]}, "attention_layers"),
    "a window below zero": ({**ATTENTION, "attention_window": -1}, "attention_window"),
    "text": ({"return_attention_tokens": "yes"}, "return_attention_tokens"),
}


@pytest.mark.parametrize(("fields", "param"), BAD_ATTENTION.values(), ids=BAD_ATTENTION)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_wish_that_is_wrong_is_refused(cluster: Cluster, path: str, fields: dict[str, Any], param: str) -> None:
    prompt = {"text": "a"} if path == "/generate" else {"prompt": "a"}
    status, answer = cluster.post(path, {**prompt, **fields})
    assert status == 400
    assert param.split("[")[0] in json.dumps(answer)


MOST_LISTED: Any = {"return_attention_tokens": True, "top_k_attention": 32, "attention_layers": [*range(8)]}


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_an_output_of_which_nothing_is_said_ends_where_no_more_can_be_listed(
    cluster: Cluster, num_outputs: int
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "n": num_outputs, **MOST_LISTED}
    status, answer = cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert cluster.decode().started[-1].sampling.max_tokens == 512 // num_outputs


@pytest.mark.parametrize("body", [{"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}])
def test_the_lists_of_all_outputs_of_a_request_are_bounded_together(cluster: Cluster, body: dict[str, Any]) -> None:
    assert cluster.post("/v1/completions", {"prompt": "a", "max_tokens": 512, **MOST_LISTED})[0] == 200
    status, answer = cluster.post("/v1/completions", {**body, "max_tokens": 512, **MOST_LISTED})
    assert (status, answer["error"]["param"]) == (400, "top_k_attention")
    assert "not 32 * 8 * 512 * 2 = 262144" in answer["error"]["message"]


def stream(cluster: Cluster, path: str = "/generate", **body: Any) -> list[Any]:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", path, json.dumps({"stream": True, **body}))
    *events, end = connection.getresponse().read().decode().strip().split("\n\n")
    connection.close()
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_an_event_of_a_stream_has_all_of_the_output_so_far(cluster: Cluster) -> None:
    cluster.script = "Zoë 🙂!"
    events = stream(cluster, text="a", return_logprob=True, top_logprobs_num=1)
    ids, end = [*cluster.tokenizer.encode(cluster.script), EOS], events[-1]
    for event in events:
        meta = event["meta_info"]
        assert cluster.script.startswith(event["text"])
        assert event["output_ids"] == ids[: len(event["output_ids"])]
        assert meta["completion_tokens"] == len(event["output_ids"]) == len(meta["output_token_logprobs"])
        assert len(meta["output_top_logprobs"]) == meta["completion_tokens"]
        assert meta["prompt_tokens"] == 1
    assert len(events) > 2
    assert (end["text"], end["output_ids"]) == (cluster.script, ids)
    assert (end["meta_info"]["finish_reason"], end["meta_info"]["cached_tokens"]) == (
        {"type": "stop", "matched": EOS},
        3,
    )


def test_several_outputs_of_a_stream_grow_each_by_itself(cluster: Cluster) -> None:
    events = stream(cluster, text=["a", "bc"], sampling_params={"n": 2})
    last = {event["index"]: event for event in events}
    assert [last[index]["text"] for index in range(4)] == ["Hi!"] * 4
    assert [last[index]["meta_info"]["prompt_tokens"] for index in range(4)] == [1, 1, 2, 2]


def test_the_bytes_of_a_stream_grow_with_the_length_of_its_output(cluster: Cluster) -> None:
    layout = GenerateLayout("id", cluster.tokenizer.token_bytes, GenerateStyle())
    layout.prompts = [[1]]
    num_tokens = 4_000
    pieces = [Piece("a", (number,)) for number in range(num_tokens)]
    events = [event for piece in pieces for event in map(deepcopy, layout.chunks(0, piece, is_first=False))]
    assert [len(event["output_ids"]) for event in events[:TOLD_AGAIN]] == [*range(1, TOLD_AGAIN + 1)]
    assert sum(len(event["output_ids"]) for event in events) <= (TOLD_AGAIN + 1) * num_tokens
    assert all(event["text"] == "a" * len(event["output_ids"]) for event in events)
    [end] = layout.chunks(0, Piece("", (), end=End(Finish.LENGTH, Usage(1, num_tokens, 0))), is_first=False)
    assert (end["text"], end["output_ids"]) == ("a" * num_tokens, [*range(num_tokens)])


def test_an_event_of_a_stream_may_have_only_what_is_new(cluster: Cluster) -> None:
    parts = stream(cluster, text="a", incremental_streaming_output=True)
    assert "".join(part["text"] for part in parts) == "Hi!"
    assert [token for part in parts for token in part["output_ids"]] == [*cluster.tokenizer.encode("Hi!"), EOS]
    counts = [part["meta_info"]["completion_tokens"] for part in parts]
    assert (counts, len(counts) > 1) == (sorted(counts), True)
    assert counts[-1] == 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_no_new_tokens_read_the_prompt(cluster: Cluster, is_stream: bool) -> None:
    body: Any = {"text": "abc", "sampling_params": {"max_new_tokens": 0}}
    answer = stream(cluster, **body)[-1] if is_stream else post(cluster, "/generate", **body)
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert (meta["finish_reason"], meta["completion_tokens"], meta["prompt_tokens"]) == (
        {"type": "length", "length": 0},
        0,
        3,
    )


def test_a_prompt_is_scored_without_output(cluster: Cluster) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    meta = post(cluster, "/generate", text="ab", **fields)["meta_info"]
    assert ([entry[1:] for entry in meta["input_token_logprobs"]], meta["output_token_logprobs"]) == (
        [[64, "a"], [65, "b"]],
        [],
    )


@pytest.mark.parametrize(("wanted", "text"), [(True, "H"), (False, None), (None, "H")])
def test_the_text_of_scored_tokens_may_be_left_out(cluster: Cluster, wanted: bool | None, text: str | None) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": wanted}
    meta = post(cluster, "/generate", text="a", sampling_params={"max_new_tokens": 1}, **fields)["meta_info"]
    assert (meta["output_token_logprobs"][0][2], meta["output_top_logprobs"][0][0][2] is None) == (text, text is None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": [257]}, "input_ids"),
        ({"text": "a", "sampling_params": {"regex": "a" * (2**18 + 1)}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 1}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params"),
        ({"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        (
            {"text": "a", "custom_logit_processor": "b", "sampling_params": {"custom_params": {"a": "x" * 20_000}}},
            "sampling_params.custom_params",
        ),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [257]}, "token_ids_logprob"),
        (
            {"text": "a", "return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0},
            "token_ids_logprob",
        ),
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
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": "red"}, "colour"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_tokens_of_nonsense_are_refused(cluster: Cluster, path: str, fields: Any, param: str) -> None:
    status, answer = cluster.post(path, fields)
    assert (status, answer["error"]["param"]) == (400, param)


def test_workers_that_tokenise_leave_tokenize_to_the_router(start_cluster: Any) -> None:
    cluster = start_cluster(tokenize_at="worker")
    assert post(cluster, "/tokenize", prompt="ab")["tokens"] == cluster.tokenizer.encode("ab")
