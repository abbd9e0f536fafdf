"""Prompts that travel as text: what workers are sent, what clients see of it (nothing), and where texts are routed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2 import StartLeg

RETRACTED = worker_pb2.ERROR_CODE_RETRACTED
SCRIPT = "Zoë says: 😀 and more."


@pytest.fixture(scope="module")
def shared(start_shared_cluster: Callable[..., Any]) -> Any:
    return start_shared_cluster(prefill=2, decode=2, tokenize_at="worker", policy="pair_cost")


@pytest.fixture
def cluster(shared: Any) -> Any:
    shared.script = SCRIPT
    for worker in shared.workers:
        worker.started.clear()
        worker.faults = []
    return shared


def legs(cluster: Any) -> list[StartLeg]:
    return [leg for worker in cluster.workers for leg in worker.started]


def test_both_legs_get_the_text(cluster: Any) -> None:
    assert cluster.complete("naïve 😀")["text"] == SCRIPT
    assert [(leg.prompt_text, leg.add_special_tokens) for leg in legs(cluster)] == [("naïve 😀", True)] * 2


def test_a_chat_is_sent_rendered_and_gets_no_special_tokens(cluster: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    status, answer = cluster.post("/v1/chat/completions", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, SCRIPT)
    assert [(leg.prompt_text, leg.add_special_tokens) for leg in legs(cluster)] == [("<user>hi\n", False)] * 2


def test_usage_counts_what_the_worker_made_of_the_text(cluster: Any) -> None:
    status, answer = cluster.post("/v1/completions", {"prompt": ["naïve 😀", "p"], "n": 2})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, len("naïve 😀".encode()) + 1)


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}, {"prompt": [72, 73]}, {"prompt": "<eos>"}])
def test_what_shows_the_prompt_s_tokens_is_tokenised_by_the_router(cluster: Any, fields: dict[str, Any]) -> None:
    cluster.complete(**fields)
    is_text = fields == {"prompt": "<eos>"}
    assert [bool(leg.prompt_text) for leg in legs(cluster)] == [is_text] * 2


def test_whoever_asks_for_tokens_gets_them(cluster: Any) -> None:
    status, answer = cluster.post("/tokenize", {"prompt": "hi"})
    assert (status, answer["tokens"]) == (200, cluster.tokenizer.encode("hi"))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_replay_is_the_text_and_the_tokens_so_far(cluster: Any, fail: Any, seed: int | None) -> None:
    cluster.script = None if seed else SCRIPT
    fields = {"seed": seed, "max_tokens": 40}
    wanted = cluster.complete("once upon", **fields)["text"]
    for worker in cluster.workers:
        worker.started.clear()
        worker.faults = [fail(5, RETRACTED)] if worker.instance.role == 2 else []
    status, answer = cluster.post("/v1/completions", {"prompt": "once upon", **fields})
    assert (status, answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == (200, wanted, 9)
    replays = [leg for leg in legs(cluster) if leg.num_prior_output_tokens]
    assert replays
    for leg in replays:
        prior = leg.num_prior_output_tokens
        assert leg.prompt_text == "once upon"
        assert len(leg.prompt_token_ids) == 9 + prior
        assert leg.sampling.max_tokens == 40 - prior


def test_a_text_that_is_too_long_is_refused_as_the_router_would(cluster: Any, fail: Any) -> None:
    for worker in cluster.workers:
        worker.faults = [fail(0, worker_pb2.ERROR_CODE_TOO_LONG)]
    status, answer = cluster.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["message"] == "told to fail"  # the worker's words, which are the router's


def test_a_text_that_has_no_utf8_form_is_refused(cluster: Any) -> None:
    status, answer = cluster.post("/v1/completions", b'{"prompt": "a\\ud800"}')
    assert status == 400, answer
    assert legs(cluster) == []


def test_a_text_goes_where_its_beginning_went(cluster: Any) -> None:
    beginnings = [f"{number}: " + "word " * 400 for number in range(5)]  # in turns they would not come home
    homes: dict[str, set[int]] = {beginning: set() for beginning in beginnings}
    for turn in range(3):
        for beginning in beginnings:
            for worker in cluster.workers:
                worker.started.clear()
            cluster.complete(beginning + "x" * 600 * turn)
            homes[beginning] |= {w.instance.instance_id for w in cluster.workers if w.started and w.instance.role == 1}
    assert [len(home) for home in homes.values()] == [1] * 5
    assert len(set.union(*homes.values())) == 2
