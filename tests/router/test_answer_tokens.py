"""What answers tell of tokens beyond OpenAI's API, in vLLM's words: those of prompt and output, and what ended it."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from diptych.generation.finish import Finish
from diptych.router.http.openai.chat_layout import ChatLayout
from diptych.router.http.openai.completion_layout import CompletionLayout, Style
from diptych.router.text.parsing.tool_use import NO_TOOLS
from diptych.router.values.output import End, Output, Piece, Usage
from diptych.router.values.request import ServedModel
from diptych.tokens.tokenizer import Tokenizer

Cluster = Any
EOS = 256
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS: dict[str, dict[str, Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "<user>hi\n"}}
EVERY_PATH = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    cluster = start_shared_cluster()
    cluster.script = "one, two"
    return cluster


@pytest.fixture(scope="module")
def worker_side(start_shared_cluster: Any) -> Cluster:
    """A router whose workers tokenise."""
    cluster = start_shared_cluster(tokenize_at="worker")
    cluster.script = "one, two"
    return cluster


def ask(cluster: Cluster, path: str, **fields: Any) -> Any:
    status, answer = cluster.post(path, {**PATHS[path], **fields})
    assert status == 200, answer
    return answer


def stream(cluster: Cluster, path: str, **fields: Any) -> list[Any]:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", path, json.dumps({**PATHS[path], **fields, "stream": True}))
    *events, _ = connection.getresponse().read().decode().strip().split("\n\n")
    connection.close()
    return [json.loads(event.removeprefix("data: ")) for event in events]


# how an output ends: (fields, what its answer says)
ENDS: dict[str, tuple[dict[str, Any], tuple[str, str | int | None]]] = {
    "at a stop string": ({"stop": ["xx", ", t"]}, ("stop", ", t")),
    "at the end of sequence": ({}, ("stop", None)),
    "at the end of sequence, named too": ({"stop_token_ids": [EOS]}, ("stop", None)),
    "at its length": ({"max_tokens": 2}, ("length", None)),
    "at an expression": ({"stop_regex": "t.o"}, ("stop", None)),
}


@EVERY_PATH
@pytest.mark.parametrize(("fields", "end"), ENDS.values(), ids=ENDS.keys())
def test_an_answer_says_what_ended_it(cluster: Cluster, path: str, fields: Any, end: Any) -> None:
    (whole,) = ask(cluster, path, **fields)["choices"]
    last = stream(cluster, path, **fields)[-1]["choices"][0]
    assert [(choice["finish_reason"], choice["stop_reason"]) for choice in (whole, last)] == [end, end]


@pytest.mark.parametrize("layout", [ChatLayout, CompletionLayout])
def test_a_token_that_ended_it_is_named_unless_it_is_the_end_of_sequence(
    byte_tokenizer: Tokenizer, layout: Any
) -> None:
    model = ServedModel("m", byte_tokenizer, 257, 2048)
    made = layout(model, Style(), NO_TOOLS, stream=True) if layout is ChatLayout else layout(model, Style())
    made.prompts = [[1], [1]]
    for index, (token, told) in enumerate([(11, 11), (EOS, None)]):
        end = End(Finish.STOP, Usage(1, 1, 0), stop_token=token)
        last = made.chunks(index, Piece("", [token], end), is_first=True)[-1]
        assert last["choices"][0]["stop_reason"] == told
        whole = made.whole([Output("", [token], end)], Usage(1, 1, 0))
        assert whole["choices"][0]["stop_reason"] == told


@EVERY_PATH
@pytest.mark.parametrize("side", ["cluster", "worker_side"])
def test_the_tokens_of_prompt_and_output_come_on_demand(request: pytest.FixtureRequest, side: str, path: str) -> None:
    cluster = request.getfixturevalue(side)
    prompt, output = cluster.tokenizer.encode("<user>hi\n"), [*cluster.tokenizer.encode("one, two"), EOS]
    answer = ask(cluster, path, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == output
    assert (answer if "chat" in path else choice)["prompt_token_ids"] == prompt
    chunks = stream(cluster, path, return_token_ids=True)
    said = [part.get("prompt_token_ids") for part in (chunks if "chat" in path else [c["choices"][0] for c in chunks])]
    assert said == [prompt, *[None] * (len(chunks) - 1)]


@EVERY_PATH
def test_nobody_gets_them_unasked(cluster: Cluster, path: str) -> None:
    assert "token_ids" not in json.dumps([ask(cluster, path), stream(cluster, path)])


def test_each_prompt_and_each_of_its_choices_has_its_own_tokens(cluster: Cluster) -> None:
    fields: Any = {"prompt": ["a", "bc"], "n": 2, "best_of": 3, "return_token_ids": True}
    prompts = [choice["prompt_token_ids"] for choice in ask(cluster, "/v1/completions", **fields)["choices"]]
    assert prompts == [[64]] * 2 + [[65, 66]] * 2


@EVERY_PATH
@pytest.mark.parametrize("is_stream", [False, True])
def test_scored_tokens_may_be_written_as_ids(cluster: Cluster, path: str, is_stream: bool) -> None:
    wanted: Any = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
    fields = {**wanted, "return_tokens_as_token_ids": True, "max_tokens": 2}
    chunks = stream(cluster, path, **fields) if is_stream else [ask(cluster, path, **fields)]
    parts = [part for chunk in chunks for choice in chunk["choices"] if (part := choice["logprobs"])]
    ids = [f"token_id:{token_id}" for token_id in cluster.tokenizer.encode("on")]
    if "chat" in path:
        content = [entry for part in parts for entry in part["content"]]
        assert [(entry["token"], entry["bytes"]) for entry in content] == list(zip(ids, [[111], [110]], strict=True))
        assert {top["token"] for entry in content for top in entry["top_logprobs"]} == {"token_id:0"}
    else:
        assert [token for part in parts for token in part["tokens"]] == ids
        tops = [top for part in parts for top in part["top_logprobs"]]
        assert [set(top) for top in tops] == [{token, "token_id:0"} for token in ids]
