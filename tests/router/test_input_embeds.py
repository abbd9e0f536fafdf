"""`input_embeds` of /generate: what workers are sent, and what is refused."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diptych.generation.leg_prompt import contents_of
from diptych.generation.segments import content_of_rows, without_pixels
from diptych.v1.worker_pb2 import ERROR_CODE_PEER_LOST, StartLeg

Cluster = Any
WIDTH = 1024  # of the model
ROWS = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)
SHORT: Any = {"max_new_tokens": 2}


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


@pytest.fixture
def legs(cluster: Cluster) -> Callable[[], list[StartLeg]]:
    """Forget what was sent before; return the legs of now: prefill's, decode's."""
    for worker in cluster.workers:
        worker.started.clear()
    return lambda: [*cluster.prefill().started, *cluster.decode().started]


def generate(cluster: Cluster, rows: Any, **fields: Any) -> Any:
    status, answer = cluster.post("/generate", {"input_embeds": rows, "sampling_params": SHORT, **fields})
    assert status == 200, answer
    return answer


def refusal(cluster: Cluster, body: Any) -> tuple[int, str]:
    status, answer = cluster.post("/generate", {"sampling_params": SHORT, **body})
    return status, answer["error"]["message"]


def test_rows_are_the_prompt_and_their_numbers_go_to_who_computes_it(cluster: Cluster, legs: Any) -> None:
    answer = generate(cluster, ROWS.tolist())
    assert (answer["meta_info"]["prompt_tokens"], answer["meta_info"]["completion_tokens"]) == (5, 2)
    prefill, decode = legs()
    content = content_of_rows(ROWS)
    assert (list(contents_of(prefill)), len(prefill.prompt_token_ids)) == ([content], 0)
    assert (list(contents_of(decode)), len(decode.prompt_token_ids)) == ([without_pixels(content)], 0)


def test_a_list_of_prompts_is_answered_with_a_list(cluster: Cluster, legs: Any) -> None:
    answers = generate(cluster, [ROWS.tolist(), ROWS[:2].tolist()])
    assert [(each["index"], each["meta_info"]["prompt_tokens"]) for each in answers] == [(0, 5), (1, 2)]
    assert sorted(contents_of(leg)[0].num_tokens for leg in legs()) == [2, 2, 5, 5]


def test_whole_numbers_are_numbers_and_several_outputs_have_one_prompt(cluster: Cluster, legs: Any) -> None:
    answers = generate(cluster, [[1] * WIDTH], sampling_params={"max_new_tokens": 1, "n": 2})
    assert [each["meta_info"]["prompt_tokens"] for each in answers] == [1, 1]
    assert {contents_of(leg)[0].digest for leg in legs()} == {content_of_rows(np.ones((1, WIDTH), np.float32)).digest}


def test_a_stream_counts_rows_as_its_prompt(cluster: Cluster) -> None:
    body: Any = {"input_embeds": ROWS.tolist(), "sampling_params": SHORT, "stream": True}
    with urllib.request.urlopen(cluster.url + "/generate", json.dumps(body).encode(), timeout=200) as response:
        answer = response.read().decode()
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert {event["meta_info"]["prompt_tokens"] for event in events} == {5}


def test_a_request_whose_decode_worker_is_lost_is_sent_again_with_its_rows(
    cluster: Cluster, legs: Any, fail: Any
) -> None:
    cluster.script = "Hello, world!"
    cluster.decode().faults.append(fail(3, ERROR_CODE_PEER_LOST))
    generate(cluster, ROWS.tolist(), sampling_params={"max_new_tokens": 8})
    again = [leg for leg in legs() if contents_of(leg)[0].is_computable]
    assert len(again) == 2
    assert {contents_of(leg)[0].digest for leg in again} == {content_of_rows(ROWS).digest}


def test_salts_go_with_rows(cluster: Cluster, legs: Any) -> None:
    generate(cluster, ROWS.tolist(), cache_salt="a")
    generate(cluster, ROWS.tolist(), cache_salt="b")
    assert len({leg.cache_salt for leg in legs()}) == 2


def test_what_rows_take_of_the_memory_once_for_each_output_is_bounded_and_given_back(start_cluster: Any) -> None:
    cluster = start_cluster(image_memory_bytes=8 * ROWS.nbytes)
    budget = cluster.router.preparer._pixels
    body = {"input_embeds": [ROWS.tolist()], "sampling_params": SHORT | {"n": 2}}
    budget.charge("", 6 * ROWS.nbytes)
    generate(cluster, [ROWS.tolist()], sampling_params=SHORT | {"n": 2})
    cluster.wait_until(lambda: budget.num_bytes == 6 * ROWS.nbytes)
    budget.charge("", 1)
    status, answer = cluster.post("/generate", body)
    assert (status, "images and rows of all requests" in answer["error"]["message"]) == (429, True)
    for several in ({"sampling_params": SHORT | {"n": 3}}, {"input_embeds": [ROWS.tolist(), ROWS[:1].tolist()]}):
        status, answer = cluster.post("/generate", body | several)
        assert (status, "ask for fewer outputs" in answer["error"]["message"]) == (400, True)


WRONG = {
    "a narrow row": ({"input_embeds": [[1.0] * 5]}, "a row of input_embeds has 1024 numbers"),
    "a narrow second prompt": (
        {"input_embeds": [ROWS.tolist(), [[1.0] * 5]]},
        "a row of input_embeds has 1024 numbers, the hidden size of tiny, not 5",
    ),
    "rows of two widths": ({"input_embeds": [[1.0] * 5, [1.0] * 4]}, "row 1 of input_embeds has 4 numbers"),
    "text beside rows": ({"input_embeds": ROWS.tolist(), "text": "a"}, "give one of text, input_ids and input_embeds"),
    "tokens beside rows": ({"input_embeds": ROWS.tolist(), "input_ids": [1]}, "give one of text, input_ids"),
    "images beside rows": ({"input_embeds": ROWS.tolist(), "image_data": "x"}, "input_embeds has no place for images"),
    "too large a number": ({"input_embeds": [[1e39] * WIDTH]}, "no float32 holds"),
    "scores of the prompt": (
        {"input_embeds": ROWS.tolist(), "return_logprob": True, "logprob_start_len": 0},
        "leave out echo, logprob_start_len and",
    ),
    "no rows": ({"input_embeds": []}, "input_embeds"),
    "an empty row": ({"input_embeds": [[]]}, "input_embeds"),
    "a text": ({"input_embeds": "abc"}, "input_embeds"),
    "a text in a row": ({"input_embeds": [["1.0"] * WIDTH]}, "input_embeds"),
    "true in a row": ({"input_embeds": [[True] * WIDTH]}, "input_embeds"),
    "NaN in a row": ({"input_embeds": [[float("nan")] * WIDTH]}, "input_embeds"),
    "four levels": ({"input_embeds": [[[[1.0]]]]}, "input_embeds"),
    "more numbers than are ever read": ({"input_embeds": [[0] * WIDTH] * 1025}, "the body holds too much"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_prompt_of_rows_is_refused_in_words(cluster: Cluster, legs: Any, name: str) -> None:
    body, words = WRONG[name]
    status, message = refusal(cluster, body)
    assert status == 400
    assert words in message
    assert not legs()
