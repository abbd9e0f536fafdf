"""Files and batches by OpenAI's client, through a router and simulated workers."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych.architectures.pooling import Pooling
from diptych.router import batches_wiring
from diptych.router.http.openai import batch_lines
from diptych.router.keys.keyring import digest_of

Cluster = Any
Start = Callable[..., Cluster]
OVER = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Look often, and don't wait for the disk: what is tested is neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_wiring, "TICK_S", 0.02)
        patch.setattr(batches_wiring, "LOOK_S", 0.05)
        patch.setattr(batch_lines, "LEARNING_S", 0.0)  # all workers are known
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Start, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp("keys")
    keys = "".join(f'[{name}]\nsha256 = "{digest_of(name).hex()}"\n' for name in ("ann", "ben"))
    (folder / "keys.toml").write_text(keys)
    options = {
        "batch_store": str(folder / "store"),
        "api_keys_file": folder / "keys.toml",
        "usage_log": folder / "usage",
    }
    return start_shared_cluster(**options, batch_file_bytes=20_000)


@contextmanager
def client_of(cluster: Cluster, key: str = "ann") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def lines(bodies: Sequence[Any], url: str = "/v1/completions") -> bytes:
    said = [
        {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    return b"\n".join(json.dumps(each).encode() for each in said)


def begin(client: openai.OpenAI, data: bytes, endpoint: Any = "/v1/completions", window: Any = "24h") -> Any:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, metadata={"night": "1"}
    )


def wait_until_over(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 200
    while (batch := client.batches.retrieve(batch_id)).status not in OVER:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def read(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []


def test_a_batch_of_each_endpoint_is_answered_line_by_line_as_the_endpoint_answers(cluster: Cluster) -> None:
    cluster.script = "Hello!"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    with client_of(cluster) as client:
        cases: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
            ("/v1/chat/completions", chat, lambda body: body["choices"][0]["message"]["content"]),
            ("/v1/completions", {"model": "tiny", "prompt": "p", "n": 2}, lambda body: body["choices"][1]["text"]),
            ("/v1/responses", {"model": "tiny", "input": "hi"}, lambda body: body["output"][0]["content"][0]["text"]),
        ]
        for endpoint, body, text in cases:
            batch = begin(client, lines([body, body, body], endpoint), endpoint)
            assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"night": "1"})
            batch = wait_until_over(client, batch.id)
            counts = (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed)
            assert (batch.status, counts, batch.error_file_id) == ("completed", (3, 3, 0), None)
            found = read(client, batch.output_file_id)
            assert sorted(each["custom_id"] for each in found) == ["line-0", "line-1", "line-2"]
            assert {each["response"]["status_code"] for each in found} == {200}
            assert {text(each["response"]["body"]) for each in found} == {"Hello!"}
            assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_embeddings_are_made_in_batches(start_cluster: Start, tmp_path: Path) -> None:
    cluster = start_cluster(decode=0, pooling=Pooling("embed", "last", normalize=True), batch_store=str(tmp_path))
    with client_of(cluster) as client:
        batch = begin(client, lines([{"model": "tiny", "input": ["a", "b"]}], "/v1/embeddings"), "/v1/embeddings")
        (found,) = read(client, wait_until_over(client, batch.id).output_file_id)
        expected = client.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
        data = found["response"]["body"]["data"]
        assert [each["embedding"] for each in data] == [each.embedding for each in expected.data]


def test_what_the_endpoint_refuses_is_a_line_of_the_file_of_errors(cluster: Cluster) -> None:
    with client_of(cluster) as client:
        batch = begin(client, lines([{"prompt": "p"}, {"prompt": "p", "model": "other"}, {"prompt": 1}]))
        batch = wait_until_over(client, batch.id)
        assert (batch.status, batch.request_counts.failed) == ("completed", 2)
        assert [each["custom_id"] for each in read(client, batch.output_file_id)] == ["line-0"]
        errors = {each["custom_id"]: each["response"] for each in read(client, batch.error_file_id)}
        assert [errors[each]["status_code"] for each in ("line-1", "line-2")] == [404, 400]
        assert errors["line-1"]["body"]["error"]["code"] == "model_not_found"


BAD_LINES = [
    (b"{", "invalid_json_line"),
    (b"[]", "invalid_json_line"),
    (b'{"method": "POST", "url": "/v1/completions", "body": {}}', "invalid_custom_id"),
    (b'{"custom_id": "1", "url": "/v1/completions", "body": {}}', "invalid_method"),
    (b'{"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {}}', "mismatched_url"),
    (b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": 1}', "invalid_body"),
    (b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"stream": true}}', "invalid_body"),
    (lines([{"prompt": "p"}]), "duplicate_custom_id"),
    (b"\xff", "invalid_json_line"),
    (b"[" * 2000, "invalid_json_line"),
    (lines([{"prompt": json.loads("[" * 300 + "]" * 300)}]), "invalid_body"),
]


def test_lines_that_are_no_requests_fail_the_batch_and_each_is_named(cluster: Cluster) -> None:
    with client_of(cluster) as client:
        data = b"\n".join([lines([{"prompt": "p"}]), b" ", *(line for line, _ in BAD_LINES)])
        batch = wait_until_over(client, begin(client, data).id)
        assert (batch.status, batch.output_file_id) == ("failed", None)
        assert [(each.line, each.code) for each in batch.errors.data] == [
            (number, code) for number, (_, code) in enumerate(BAD_LINES, 3)
        ]
        empty = wait_until_over(client, begin(client, b"\n\n").id)
        assert [each.code for each in empty.errors.data] == ["empty_file"]


def test_a_cancelled_batch_stops_what_runs_and_says_which_lines_were_not_run(cluster: Cluster) -> None:
    cluster.script = None  # outputs without an end
    with client_of(cluster) as client:
        body = {"prompt": "p", "max_tokens": 1000}
        for worker in cluster.workers:
            worker.step_s = 0.05
        batch = begin(client, lines([body] * 30))
        cluster.wait_until(lambda: cluster.router.serving.batches.runner.num_working)
        cluster.wait_until(lambda: cluster.decode().running)
        with pytest.raises(openai.ConflictError, match="reads this file"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = wait_until_over(client, batch.id)
        assert batch.status == "cancelled"
        found = [*read(client, batch.output_file_id), *read(client, batch.error_file_id)]
        assert sorted(each["custom_id"] for each in found) == sorted(f"line-{number}" for number in range(30))
        assert found[-1]["error"]["code"] == "batch_cancelled"
        cluster.wait_until(lambda: not cluster.decode().running)
        with pytest.raises(openai.ConflictError, match="nothing to cancel"):
            client.batches.cancel(begin_and_end(client).id)
    cluster.script = "Hello!"


def begin_and_end(client: openai.OpenAI) -> Any:
    return wait_until_over(client, begin(client, b"no").id)


def test_a_batch_that_was_not_done_in_its_window_says_so_line_by_line(cluster: Cluster) -> None:
    with client_of(cluster) as client:
        cluster.publish()  # nobody can serve
        batch = begin(client, lines([{"prompt": "p"}] * 3), window="1s")
        batch = wait_until_over(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("expired", 0)
        assert {each["error"]["code"] for each in read(client, batch.error_file_id)} == {"batch_expired"}
        cluster.publish(*cluster.workers)


def test_others_see_neither_files_nor_batches(cluster: Cluster) -> None:
    with client_of(cluster) as ann, client_of(cluster, "ben") as ben:
        batch = wait_until_over(ann, begin(ann, lines([{"prompt": "p"}])).id)
        looks: list[Callable[[], Any]] = [
            lambda: ben.batches.retrieve(batch.id),
            lambda: ben.batches.cancel(batch.id),
            lambda: ben.files.retrieve(batch.output_file_id),
            lambda: ben.files.content(batch.output_file_id),
            lambda: ben.files.delete(batch.input_file_id),
        ]
        for look in looks:
            with pytest.raises(openai.NotFoundError):
                look()
        assert (list(ben.files.list()), list(ben.batches.list())) == ([], [])
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            ben.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")


def test_lists_come_in_pages_with_the_newest_first(cluster: Cluster) -> None:
    with client_of(cluster, "ben") as client:
        made = [client.files.create(file=(f"{n}.jsonl", b"x"), purpose="batch") for n in range(5)]
        page = client.files.list(limit=2)
        assert ([each.filename for each in page.data], page.has_more) == (["4.jsonl", "3.jsonl"], True)
        assert [each.id for each in client.files.list(limit=2)] == [each.id for each in reversed(made)]
        assert [each.bytes for each in client.files.list(order="asc", after=made[3].id)] == [1]
        batches = [begin_and_end(client) for _ in range(3)]
        assert [each.id for each in client.batches.list(limit=2)] == [each.id for each in reversed(batches)]
        assert list(client.files.list(purpose="batch_output")) == []
        for each in made:
            assert client.files.delete(each.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made[0].id)


def test_who_asks_again_with_the_same_key_gets_the_same_batch(cluster: Cluster) -> None:
    with client_of(cluster) as client:
        file = client.files.create(file=("in.jsonl", lines([{"prompt": "p"}])), purpose="batch")

        def ask(key: str) -> str:
            return client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/completions",
                completion_window="24h",
                extra_headers={"Idempotency-Key": key},
            ).id

        asked = [ask("one"), ask("one"), ask("two")]
        assert (asked[0] == asked[1], asked[0] == asked[2]) == (True, False)
        assert wait_until_over(client, asked[0]).status == "completed"
        assert ask("one") == asked[0]
        with pytest.raises(openai.BadRequestError, match="1 to 256 characters"):
            ask("k" * 257)
        wait_until_over(client, asked[2])


def test_what_is_wrong_with_an_upload_is_said(cluster: Cluster) -> None:
    with client_of(cluster) as client:
        with pytest.raises(openai.BadRequestError, match="purpose must be"):
            client.files.create(file=("a", b"x"), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="files stay until"):
            client.files.create(
                file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
            )
        with pytest.raises(openai.APIStatusError, match="at most 20000 bytes") as caught:
            client.files.create(file=("a", b"x" * 20_001), purpose="batch")
        assert caught.value.status_code == 413
        num_files = len(list(client.files.list()))
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    for content_type, body, words in (
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"{}", "multipart/form-data"),
        ("multipart/form-data; boundary=b", b"nothing like a form", "can't be read"),
        ("multipart/form-data; boundary=b", form, "ends before"),
        ("multipart/form-data; boundary=b", form + b"--b--\r\n", "no part `file`"),
        ("multipart/form-data; boundary=b", form.replace(b"batch", b"b" * 2000) + b"--b--\r\n", "longer than"),
    ):
        headers = {"content-type": content_type, "authorization": "Bearer ann"}
        status, answer = cluster.post("/v1/files", body, headers)
        assert (status, words in answer["error"]["message"]) == (400, True), answer
    with client_of(cluster) as client:
        assert len(list(client.files.list())) == num_files, "nothing is left of those"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/files/..%2f..%2fkeys.toml", 404),
        ("/v1/files/nothing/content", 404),
        ("/v1/batches/batch_0", 404),
        ("/v1/batches?limit=0", 400),
        ("/v1/files?order=up", 400),
        ("/v1/files?limit=%D9%A3", 400),
        (f"/v1/files?limit={'1' * 5000}", 400),
    ],
)
def test_what_nobody_made_is_not_found(cluster: Cluster, path: str, status: int) -> None:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=60)
    connection.request("GET", path, headers={"authorization": "Bearer ann"})
    with connection.getresponse() as answer:
        assert answer.status == status, answer.read()
    connection.close()


def test_lines_count_for_their_key_and_once_in_the_usage_log(cluster: Cluster, tmp_path: Path) -> None:
    usage = cluster.router.serving.shared.usage
    with client_of(cluster, "ben") as client:
        batch = wait_until_over(client, begin(client, lines([{"prompt": "abc", "max_tokens": 2}] * 4)).id)
        name = batch.id.removeprefix("batch_")
        path = Path(usage._path)
        cluster.wait_until(lambda: path.read_text().count(name) == 4)
    rows = [json.loads(row) for row in path.read_text().splitlines() if name in row]
    assert sorted(row["request_id"] for row in rows) == [f"batch_req_{name}_{number}" for number in range(1, 5)]
    assert {(row["tenant"], row["prompt_tokens"], row["output_tokens"]) for row in rows} == {("ben", 3, 2)}
    _, text = cluster.get("/metrics")
    assert 'diptych_router_batch_lines_total{outcome="ok"}' in text


def test_a_batch_waits_while_anybody_waits_for_a_first_token(cluster: Cluster, hang: Callable[[int], Any]) -> None:
    with client_of(cluster) as client:
        cluster.prefill().faults.append(hang(0))
        waiting = cluster.connect(headers={"authorization": "Bearer ben"}, prompt="me first")
        cluster.wait_until(lambda: cluster.prefill().running)
        num_started = len(cluster.prefill().started)
        batch = begin(client, lines([{"prompt": "p"}] * 3))
        runner = cluster.router.serving.batches.runner
        cluster.wait_until(lambda: any(work.job.validated_s for work, _ in runner._working.values()))
        cluster.wait_until(lambda: runner._bench.slots._turns[0].locked())
        looks = Counter[str]()
        cluster.wait_until(lambda: looks.update("a") or looks["a"] > 20)  # 0.2 s: four looks
        assert len(cluster.prefill().started) == num_started
        cluster.release(cluster.prefill())
        assert wait_until_over(client, batch.id).status == "completed"
        assert len(cluster.prefill().started) > num_started
        waiting.close()


def test_without_a_store_the_paths_say_what_to_do(start_cluster: Start) -> None:
    status, answer = start_cluster().post("/v1/batches", {})
    assert (status, "--batch-store" in answer["error"]["message"]) == (404, True)
