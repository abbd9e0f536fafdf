"""`input_embeds` over gRPC: what workers are sent, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from diptych.generation.leg_prompt import contents_of
from diptych.generation.segments import content_of_rows, without_pixels
from diptych.router.values import validation
from diptych.v1.inference_pb2 import GenerateRequest, InputEmbeds, SamplingParams, Usage
from diptych.v1.inference_pb2_grpc import InferenceStub

Cluster = Any
WIDTH = 1024  # of the model
ROWS = np.random.default_rng(0).normal(size=(5, WIDTH)).astype("<f4")
MAX_BYTES = 9 << 20  # of a message
CONTEXT = np.ones((2048, WIDTH), "<f4")  # has no room for an output
SHORT = SamplingParams(max_tokens=2)
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3)


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster(max_body_bytes=MAX_BYTES)


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[Any]:
    for worker in cluster.workers:
        worker.started.clear()
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        yield InferenceStub(channel)


def of_rows(rows: Any, **fields: Any) -> GenerateRequest:
    return of_bytes(rows.tobytes(), rows.shape[1], **fields)


def of_bytes(values: bytes, width: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(input_embeds=InputEmbeds(width=width, values=values), **{"sampling": SHORT, **fields})


def refusal(method: Any, request: GenerateRequest) -> str:
    with pytest.raises(grpc.RpcError) as error:
        method(request, timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(error.value.details())


def test_rows_are_the_prompt_and_workers_hear_of_it_what_they_hear_over_http(cluster: Cluster, stub: Any) -> None:
    response = stub.Generate(of_rows(ROWS))
    assert (response.usage, len(response.token_ids), response.HasField("answer")) == (USAGE, 2, False)
    (prefill,), (decode,) = cluster.prefill().started, cluster.decode().started
    content = content_of_rows(ROWS)
    assert (list(contents_of(prefill)), len(prefill.prompt_token_ids)) == ([content], 0)
    assert (list(contents_of(decode)), len(decode.prompt_token_ids)) == ([without_pixels(content)], 0)
    cluster.post("/generate", {"input_embeds": ROWS.tolist(), "sampling_params": {"max_new_tokens": 2}})
    assert [list(contents_of(leg)) for leg in cluster.prefill().started] == 2 * [[content]]


def test_a_stream_counts_rows_as_its_prompt(stub: Any) -> None:
    assert list(stub.GenerateStream(of_rows(ROWS)))[-1].usage == USAGE


def test_several_outputs_have_one_prompt(cluster: Cluster, stub: Any) -> None:
    response = stub.Generate(of_rows(ROWS, n=3))
    assert (len(response.more_choices), response.usage.prompt_tokens) == (2, 5)
    assert [list(contents_of(leg)) for leg in cluster.prefill().started] == 3 * [[content_of_rows(ROWS)]]


def test_a_long_prompt_comes_as_it_was_sent(cluster: Cluster, stub: Any) -> None:
    """Its message is decoded in a thread, and its numbers are looked at in another one."""
    rows = np.random.default_rng(1).normal(size=(1500, WIDTH)).astype("<f4")
    assert stub.Generate(of_rows(rows)).usage.prompt_tokens == 1500
    assert list(contents_of(cluster.prefill().started[0])) == [content_of_rows(rows)]


BEHIND = {"NaN": np.nan, "infinity": np.inf, "infinity below zero": -np.inf}
WRONG = {
    "no rows": (of_bytes(b"", WIDTH), "input_embeds has 0 bytes: rows of 1024 float32 take"),
    "nothing at all": (GenerateRequest(input_embeds=InputEmbeds()), "width of input_embeds is 0"),
    "no width": (of_bytes(ROWS.tobytes(), 0), "width of input_embeds is 0: give the numbers of a row"),
    "a part of a number": (of_bytes(ROWS.tobytes()[:-1], WIDTH), "input_embeds has 20479 bytes: rows of 1024 float32"),
    "a part of a row": (of_bytes(ROWS.tobytes()[:-4], WIDTH), "take 4096 bytes each"),
    "a narrow row": (
        of_rows(ROWS[:, :5].copy()),
        "a row of input_embeds has 1024 numbers, the hidden size of tiny, not 5",
    ),
    "the widest row": (of_bytes(ROWS.tobytes(), 2**32 - 1), "take 17179869180 bytes each"),
    "an echo": (of_rows(ROWS, echo=True), "leave out echo"),
    "scores of the prompt": (of_rows(ROWS, sampling=SamplingParams(prompt_logprobs=1)), "prompt_logprobs"),
    "scores of its end": (
        of_rows(ROWS, sampling=SamplingParams(prompt_logprobs=1, prompt_logprobs_start=4)),
        "prompt_logprobs",
    ),
    "more outputs than there may be": (of_rows(ROWS, n=1000), "n must be between 1 and"),
    "as many rows as the context": (of_rows(CONTEXT), "2048"),
    "too many rows, of no numbers": (of_rows(CONTEXT * np.float32("nan")), "2048"),  # which are not read
    **{
        name: (of_rows(np.where(np.arange(WIDTH) == 1023, number, ROWS).astype("<f4")), "no float32 holds")
        for name, number in BEHIND.items()
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_prompt_of_rows_is_refused_in_words(cluster: Cluster, stub: Any, name: str) -> None:
    request, words = WRONG[name]
    assert words in refusal(stub.Generate, request)
    assert words in refusal(lambda each, timeout: list(stub.GenerateStream(each, timeout=timeout)), request)
    assert not any(worker.started for worker in cluster.workers)


def test_a_message_beyond_the_limit_is_refused_with_how_long_it_may_be(stub: Any) -> None:
    with pytest.raises(grpc.RpcError, match=f"larger than max .* vs. {MAX_BYTES}") as error:
        stub.Generate(of_bytes(bytes(MAX_BYTES), WIDTH))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_prompt_has_no_more_bytes_of_rows_than_a_message_to_a_worker(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_ROW_BYTES", ROWS.nbytes - 1)
    words = f"the rows of input_embeds take {ROWS.nbytes} bytes: give {ROWS.nbytes - 1} at most, so fewer rows"
    assert refusal(stub.Generate, of_rows(ROWS)) == words


def test_what_rows_take_of_the_memory_counts_once_for_each_output(start_cluster: Any) -> None:
    cluster = start_cluster(image_memory_bytes=8 * ROWS.nbytes)
    budget = cluster.router.preparer._pixels
    budget.charge("", 7 * ROWS.nbytes)
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub: Any = InferenceStub(channel)
        with pytest.raises(grpc.RpcError, match="images and rows of all requests") as error:
            stub.Generate(of_rows(ROWS, n=2))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "ask for fewer outputs" in refusal(stub.Generate, of_rows(ROWS, n=3))
        stub.Generate(of_rows(ROWS))
    cluster.wait_until(lambda: budget.num_bytes == 7 * ROWS.nbytes)
