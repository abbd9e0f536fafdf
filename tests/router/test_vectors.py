"""Embeddings, classes, scores and ranks: by OpenAI's client, plain HTTP and gRPC; one test has a real model."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import torch
import transformers
from pooling_engine import PoolingEngine

from diptych.architectures.pooling import Pooling
from diptych.checkpoints.source import open_model
from diptych.common.members.roles import LegKind
from diptych.router.grpc.convert import add_vectors
from diptych.router.http.vectors.vector_answers import encoded
from diptych.router.keys.keyring import digest_of
from diptych.router.values.vectors import Pooled
from diptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from diptych.v1.inference_pb2 import EmbedRequest, ScoreRequest, TokenIds, VectorOptions

Cluster = Any
Start = Callable[..., Cluster]
EMBED = Pooling("embed", "last", normalize=True)
CHATML = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Start) -> Cluster:
    """An embedding model on one worker, which says the sum and the number of a prompt's tokens, and 0."""
    return start_shared_cluster(decode=0, pooling=EMBED)


def embed(cluster: Cluster, key: str = "none", **fields: Any) -> Any:
    """Ask by OpenAI's client."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0) as client:
        return client.embeddings.create(model="tiny", **fields)


def unit(*numbers: float) -> list[float]:
    return (np.array(numbers) / np.linalg.norm(numbers)).tolist()  # type: ignore[no-any-return]


def test_the_client_gets_the_vectors_of_transformers_through_router_core_and_model(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    settings |= {"num_key_value_heads": 2}
    torch.manual_seed(1)
    config = transformers.Qwen3Config(vocab_size=cluster.tokenizer.vocab_size, head_dim=16, **settings)
    model: Any = transformers.Qwen3Model(config)
    model.eval()
    model.save_pretrained(tmp_path)
    worker = cluster.prefill()
    simulated, worker.vector = worker.vector, PoolingEngine(open_model(str(tmp_path))).answer
    texts = ["a text", "a text of more tokens than a step has, and so in chunks: " + 50 * "x", "a text"]
    found = embed(cluster, input=texts)
    worker.vector = simulated
    for text, each in zip(texts, found.data, strict=True):
        with torch.inference_mode():
            state = model(torch.tensor([cluster.tokenizer.encode(text)])).last_hidden_state[0, -1].numpy()
        assert np.array(each.embedding) @ state / np.linalg.norm(state) >= 0.99999, "and of length 1"
    assert [each.index for each in found.data] == [0, 1, 2]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, texts))


def test_inputs_are_texts_or_tokens_one_or_many(cluster: Cluster) -> None:
    for given, expected in (
        ("ab", [unit(64 + 65, 2, 0)]),
        (["a", "b"], [unit(64, 1, 0), unit(65, 1, 0)]),
        ([64, 65], [unit(129, 2, 0)]),
        ([[64], [65]], [unit(64, 1, 0), unit(65, 1, 0)]),
    ):
        for encoding in ("float", "base64"):
            found = embed(cluster, input=given, encoding_format=encoding)
            vectors = [each.embedding for each in found.data]
            if encoding == "base64":
                vectors = [np.frombuffer(base64.b64decode(str(each)), "<f4") for each in vectors]
            np.testing.assert_allclose(vectors, expected, rtol=1e-6)


def test_dimensions_are_the_first_and_of_length_1_again(cluster: Cluster) -> None:
    found = embed(cluster, input="ab", dimensions=2)
    np.testing.assert_allclose(found.data[0].embedding, unit(129, 2), rtol=1e-6)


def test_prompts_are_cut_only_where_that_is_wished(cluster: Cluster) -> None:
    for fields, kept in (
        ({"truncate_prompt_tokens": 2}, "ab"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, "cd"),
        ({"truncate_prompt_tokens": -1}, "abcd"),
    ):
        status, answer = cluster.post("/v1/embeddings", {"input": ["abcd"], **fields})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, len(kept))
        assert list(cluster.prefill().started[-1].prompt_token_ids) == cluster.tokenizer.encode(kept)
    status, answer = cluster.post("/v1/embeddings", {"input": "x" * 2048})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2048), "no place is kept for output"
    status, answer = cluster.post("/v1/embeddings", {"input": "x" * 2049})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "give truncate_prompt_tokens" in answer["error"]["message"]
    status, answer = cluster.post("/v1/embeddings", {"input": "x" * 20_000, "truncate_prompt_tokens": -1})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2048)


@pytest.mark.parametrize(
    ("path", "fields", "status", "words"),
    [
        ("/v1/embeddings", {}, 400, "input is required"),
        ("/v1/embeddings", {"input": ""}, 400, "input is empty"),
        ("/v1/embeddings", {"input": []}, 400, "input takes 1 to 2048 inputs, not 0"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "input takes 1 to 2048 inputs, not 2049"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input is empty"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input is empty"),
        ("/v1/embeddings", {"input": {"text": "a"}}, 400, "input must be a string, a list of strings"),
        ("/v1/embeddings", {"input": [1, True]}, 400, "input must be"),
        ("/v1/embeddings", {"input": [4096]}, 400, "4096 is not a token"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions must be between 1 and 3"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4}, 400, "dimensions must be between 1 and 3"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "encoding_format: input should be"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "the model 'other' does not exist"),
        ("/v1/embeddings", {"input": "a", "stream": True}, 400, "a vector has no stream"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, 400, "must be at least 1"),
        ("/v1/embeddings", {"input": "a", "colour": 1}, 400, "unrecognized request argument: colour"),
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1 has 2 texts and text_2 1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "judge"}, 400, "takes no instruction"),
        ("/classify", {"input": "a"}, 400, "tiny is no classifier"),
        ("/v1/completions", {"prompt": "a"}, 400, "tiny makes no text: ask for /v1/embeddings"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 400, "tiny makes no text"),
    ],
)
def test_what_is_wrong_is_said(cluster: Cluster, path: str, fields: Any, status: int, words: str) -> None:
    found, answer = cluster.post(path, fields)
    assert (found, words in answer["error"]["message"]) == (status, True), answer


def test_documents_are_ranked_by_their_likeness_and_each_text_is_computed_once(cluster: Cluster) -> None:
    before = len(cluster.prefill().started)
    body = {"query": "aa", "documents": ["zzzz", {"text": "aa"}, "aa"], "top_n": 2}
    status, answer = cluster.post("/v1/rerank", body)
    assert status == 200
    assert [(each["index"], each["document"]["text"]) for each in answer["results"]] == [(1, "aa"), (2, "aa")]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert len(cluster.prefill().started) - before == 2
    status, answer = cluster.post("/score", {"text_1": "aa", "text_2": ["aa", "zzzz"]})
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["data"][0]["score"] > answer["data"][1]["score"] > 0.99


def test_models_say_what_they_are_for_and_the_router_is_ready_without_decode(cluster: Cluster) -> None:
    assert json.loads(cluster.get("/v1/models")[1])["data"][0]["purpose"] == "embed"
    assert json.loads(cluster.get("/ready")[1])["ready"] is True
    assert json.loads(cluster.get("/get_model_info")[1])["is_generation"] is False


def test_grpc_has_the_same(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        found = stub.Embed(EmbedRequest(texts=["ab"], tokens=[TokenIds(ids=[64])], dimensions=2))
        np.testing.assert_allclose([each.values for each in found.vectors], [unit(129, 2), unit(64, 1)], rtol=1e-6)
        assert (found.usage.prompt_tokens, found.model) == (3, "tiny")
        scores = stub.Score(ScoreRequest(query="aa", documents=["aa", "zzzz"])).scores
        assert scores[0] == pytest.approx(1.0)
        for request, words in (
            (EmbedRequest(), "1 to 2048 inputs, not 0"),
            (EmbedRequest(texts=[""]), "a text is empty"),
            (EmbedRequest(texts=["a"], dimensions=9), "between 1 and 3"),
            (EmbedRequest(texts=["a"], options=VectorOptions(truncate_prompt_tokens=-2)), "at least 1"),
        ):
            with pytest.raises(grpc.RpcError, match=words) as refused:
                stub.Embed(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError, match="makes no text"):
            stub.Generate(inference_pb2.GenerateRequest(text="a"))


def counted(cluster: Cluster, name: str, tier: str) -> float:
    page = cluster.get("/metrics")[1]
    start = f'diptych_router_{name}_total{{tier="{tier}"}} '
    return sum(float(line.removeprefix(start)) for line in page.splitlines() if line.startswith(start))


def test_a_vector_keeps_its_slo_if_it_comes_within_the_time_of_a_first_token(start_cluster: Start, hang: Any) -> None:
    tiers = ("calm:ttft_ms=600000:tpot_ms=1", "hasty:ttft_ms=0.1:tpot_ms=1")
    cluster = start_cluster(decode=0, pooling=EMBED, slo_tiers=tiers, served_model_name=("ours",))
    for tier, num_kept in (("calm", 2), ("hasty", 0)):
        status, answer = cluster.post("/v1/embeddings", {"input": ["a", "b"]}, {"x-diptych-slo": tier})
        assert (status, answer["model"]) == (200, "ours")
        assert [counted(cluster, name, tier) for name in ("offered", "within_objectives")] == [2, num_kept]


async def turns_beside(work: Coroutine[Any, Any, object]) -> int:
    """Return how often others had their turn until the work was done."""
    task, num_turns = asyncio.ensure_future(work), 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0)
    await task
    return num_turns


@pytest.mark.parametrize("form", ["float", "base64", "grpc"])
def test_others_have_their_turn_between_the_vectors_of_an_answer(form: str) -> None:
    pooled = [Pooled(np.full(8, 0.1, np.float32), 1) for _ in range(100)]
    response = inference_pb2.EmbedResponse()
    assert asyncio.run(turns_beside(add_vectors(response, pooled) if form == "grpc" else encoded(pooled, form))) >= 100
    if form == "grpc":
        assert [list(each.values) for each in response.vectors] == [each.vector.tolist() for each in pooled]


def test_a_worker_that_dies_is_replaced_by_another(start_cluster: Start, fault: Any) -> None:
    cluster = start_cluster(prefill=2, decode=0, pooling=EMBED)
    for worker in cluster.workers:
        worker.faults.append(
            fault("break") if worker is cluster.workers[0] else fault("error", 0, worker_pb2.ERROR_CODE_OVERLOADED)
        )
    status, answer = cluster.post("/v1/embeddings", {"input": ["a", "b", "c"]})
    assert (status, len(answer["data"])) == (200, 3), answer


def test_who_leaves_takes_the_legs_along(start_cluster: Start, hang: Any) -> None:
    cluster = start_cluster(decode=0, pooling=EMBED)
    cluster.prefill().faults += [hang(0), hang(0)]
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", "/v1/embeddings", json.dumps({"input": ["a", "b"]}))
    cluster.wait_for(lambda: len(cluster.prefill().started) == 2)
    connection.close()
    cluster.wait_for(lambda: len(cluster.prefill().aborted) == 2 and not cluster.prefill().running)


def test_a_full_router_and_a_spent_key_answer_with_the_time_to_come_back(
    start_cluster: Start, hang: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[bob]\nsha256 = "{digest_of("b-key").hex()}"\ntokens_per_minute = 10\n')
    cluster = start_cluster(decode=0, pooling=EMBED, api_keys_file=keys, max_concurrent=4, max_queued=0)
    cluster.prefill().faults += [hang(0)] * 4
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    headers = {"authorization": "Bearer b-key"}
    connection.request("POST", "/v1/embeddings", json.dumps({"input": ["a"] * 4}), headers)
    cluster.wait_for(lambda: len(cluster.prefill().started) == 4)
    with pytest.raises(openai.RateLimitError, match="busy with 4 requests") as full:
        embed(cluster, "b-key", input="a")
    assert int(full.value.response.headers["retry-after"]) >= 1
    connection.close()
    cluster.wait_for(lambda: not cluster.prefill().running)
    embed(cluster, "b-key", input="x" * 40)
    with pytest.raises(openai.RateLimitError, match="10 tokens a minute") as spent:
        embed(cluster, "b-key", input="a")
    assert int(spent.value.response.headers["retry-after"]) >= 1


def test_classes_have_probabilities_and_a_single_score_is_one(start_cluster: Start) -> None:
    cluster = start_cluster(decode=0, pooling=Pooling("classify", "last", labels=("x", "y", "z")))
    cluster.prefill().vector = lambda leg: worker_pb2.LegOutput(
        room=leg.room,
        token_ids=[0],
        finish_reason=inference_pb2.FINISH_REASON_LENGTH,
        vector=np.log(np.array([1, 2, 5], "<f4")).tobytes(),
    )
    status, answer = cluster.post("/classify", {"input": ["a", "b"]})
    assert status == 200
    assert [(each["label"], each["num_classes"]) for each in answer["data"]] == [("z", 3), ("z", 3)]
    np.testing.assert_allclose(answer["data"][0]["probs"], [0.125, 0.25, 0.625], rtol=1e-5)
    status, answer = cluster.post("/pooling", {"input": "a"})
    np.testing.assert_allclose(answer["data"][0]["data"], np.log([1, 2, 5]), rtol=1e-5)
    assert cluster.post("/v1/score", {"text_1": "a", "text_2": "b"})[0] == 400
    assert "/classify" in cluster.post("/v1/embeddings", {"input": "a"})[1]["error"]["message"]


def test_a_model_for_text_is_asked_for_yes_or_no_at_a_prefill_worker_as_work_for_idle_time(
    start_cluster: Start, tmp_path: Path
) -> None:
    log = tmp_path / "requests"
    cluster = start_cluster(special_tokens=CHATML, request_log=log)
    assert "makes text" in cluster.post("/v1/embeddings", {"input": "a"})[1]["error"]["message"]
    status, answer = cluster.post("/v1/rerank", {"query": "q", "documents": ["d"]})
    assert (status, "could judge" in answer["error"]["message"]) == (400, True), "yes is three tokens here"
    words = {"no": [78], "yes": [89]}
    encode = cluster.tokenizer.encode_all
    cluster.tokenizer.encode_all = lambda texts, **how: [words.get(text) or encode([text], **how)[0] for text in texts]
    cluster.prefill().vector = lambda leg: worker_pb2.LegOutput(
        room=leg.room,
        token_ids=[0],
        finish_reason=inference_pb2.FINISH_REASON_LENGTH,
        vector=np.log(np.array([0.1, 0.3], "<f4")).tobytes(),
    )
    status, answer = cluster.post("/v1/rerank", {"query": "q", "documents": ["d"], "instruction": "judge"})
    assert answer["results"][0]["relevance_score"] == pytest.approx(0.75), answer
    (leg,) = cluster.prefill().started
    assert (leg.kind, list(leg.label_token_ids), leg.priority) == (LegKind.POOL.wire, [78, 89], -10)
    assert "<Instruct>: judge\n<Query>: q\n<Document>: d" in cluster.tokenizer.decode(leg.prompt_token_ids)
    assert not cluster.decode().started
    assert cluster.complete("p")["text"] == "Hello!"
    cluster.wait_until(log.read_text)
    assert [json.loads(line)["output_len"] > 0 for line in log.read_text().splitlines()] == [True], "only texts"
