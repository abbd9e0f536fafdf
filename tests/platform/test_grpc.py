from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from diptych.checkpoints.quantization.weight import as_floats, rows_of
from diptych.checkpoints.source import ModelSource
from diptych.v1 import inference_pb2, inference_pb2_grpc

Platform = Any
GREEDY = inference_pb2.SamplingParams(temperature=0, max_tokens=6)
PROMPT = inference_pb2.GenerateRequest(text="The capital of France is", sampling=GREEDY)


@pytest.fixture
def stub(platform: Platform) -> Iterator[Any]:
    with grpc.insecure_channel(platform.grpc_target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def test_generate_and_stream_agree(stub: Any) -> None:
    whole = stub.Generate(PROMPT, timeout=200)
    chunks = list(stub.GenerateStream(PROMPT, timeout=200))
    assert whole.text.startswith(" Paris")
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [t for chunk in chunks for t in chunk.token_ids] == list(whole.token_ids)
    assert chunks[-1].finish_reason == whole.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(whole.token_ids)


def test_rows_that_tokens_have_give_what_the_tokens_give(stub: Any, small_model: ModelSource) -> None:
    said = stub.Generate(PROMPT, timeout=200)
    ids = stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT.text)).token_ids
    table = next(tensor for name, tensor in small_model.tensors() if name == "model.embed_tokens.weight")
    rows = np.concatenate([as_floats(rows_of(table, slice(each, each + 1))) for each in ids])
    given = inference_pb2.InputEmbeds(width=rows.shape[1], values=rows.astype("<f4").tobytes())
    made = stub.Generate(inference_pb2.GenerateRequest(input_embeds=given, sampling=GREEDY), timeout=200)
    assert (made.text, list(made.token_ids)) == (said.text, list(said.token_ids))
    assert made.usage.prompt_tokens == said.usage.prompt_tokens == len(ids)


def test_a_deadline_ends_the_request_and_frees_it(platform: Platform, stub: Any) -> None:
    endless = inference_pb2.SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0)
    with pytest.raises(grpc.RpcError) as error:
        stub.Generate(inference_pb2.GenerateRequest(text="Once", sampling=endless), timeout=0.5)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    platform.assert_clean()


def test_a_cancelled_stream_frees_it(platform: Platform, stub: Any) -> None:
    endless = inference_pb2.SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0)
    stream = stub.GenerateStream(inference_pb2.GenerateRequest(text="Once", sampling=endless), timeout=200)
    next(stream)
    stream.cancel()
    platform.assert_clean()


def test_models_are_listed(stub: Any) -> None:
    models = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=200).models
    assert [model.context_len for model in models] == [8192]
