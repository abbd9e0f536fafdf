"""What tools of SGLang and vLLM ask beside the API: who may, what is answered, and what it does."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import Trust
from diptych.router.admission.session_line import TICKET_S, Key
from diptych.router.keys.keyring import digest_of
from diptych.v1 import inference_pb2, inference_pb2_grpc

Cluster = Any
ACTS = ("/flush_cache", "/start_profile", "/stop_profile")


@pytest.fixture(scope="module")
def shared(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    for worker in shared.workers:
        worker.admin.failure = None


def ask(cluster: Cluster, method: str, path: str, key: str = "", body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    with connection.getresponse() as answer:
        found = answer.status, json.loads(answer.read() or b"null")
    connection.close()
    return found


def test_a_server_says_what_it_is_and_how_busy_each_worker_is(cluster: Cluster) -> None:
    model = ask(cluster, "GET", "/get_model_info")[1]
    info, load = ask(cluster, "GET", "/get_server_info")[1], ask(cluster, "GET", "/get_load")[1]
    assert (model["model_path"], model["is_generation"]) == ("tiny", True)
    assert (info["model_path"], info["context_length"]) == ("tiny", 2048)
    assert [state["role"] for state in info["internal_states"]] == ["prefill", "decode"]
    assert info["decode"][0]["internal_states"] == [info["internal_states"][1]]
    assert [(each["dp_rank"], each["role"], each["num_reqs"]) for each in load] == [(0, "prefill", 0), (1, "decode", 0)]


def test_an_act_reaches_every_worker_and_says_of_each_what_came_of_it(cluster: Cluster) -> None:
    names = [f"{worker.instance.instance_id:016x}" for worker in cluster.workers]
    assert ask(cluster, "POST", "/flush_cache") == (200, {"success": True, "num_pages": dict.fromkeys(names, 7)})
    wanted = {"start_step": 3, "num_steps": 5, "activities": ["CPU", "GPU"], "instances": names[:1]}
    assert ask(cluster, "POST", "/start_profile", body=wanted) == (200, {"paths": {names[0]: "/traces/one"}})
    (request,) = cluster.workers[0].admin.profiles
    assert (request.skip_steps, request.num_steps, cluster.workers[1].admin.profiles) == (3, 5, [])
    traces = ask(cluster, "POST", "/stop_profile")[1]["traces"]
    assert traces[names[1]] == {"path": "/traces/one", "bytes": 9, "num_steps": 2, "duration_s": 0.5}


def test_a_worker_that_refuses_is_named_in_the_answer(cluster: Cluster) -> None:
    cluster.workers[1].admin.failure = grpc.StatusCode.NOT_FOUND
    status, answer = ask(cluster, "POST", "/stop_profile")
    assert (status, "told to fail" in answer["error"]) == (404, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/start_profile", {"output_dir": "/etc"}),
        ("/start_profile", {"num_steps": 1001}),
        ("/start_profile", {"with_stack": True}),
        ("/stop_profile", {"wait_s": 61}),
        ("/abort_request", {}),
        ("/flush_cache", {"all": True}),
    ],
)
def test_what_is_not_offered_is_refused_by_name(cluster: Cluster, path: str, body: Any) -> None:
    status, answer = ask(cluster, "POST", path, body=body)
    assert status == 400
    assert next(iter(body), "rid") in json.dumps(answer)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("names", ["rid", "header"])
def test_a_request_is_aborted_by_its_id_and_its_client_is_told(
    cluster: Cluster, hang: Any, is_stream: bool, names: str
) -> None:
    name = f"{names}-{is_stream}"
    cluster.decode().faults = [hang(1)]
    headers = {"x-request-id": name} if names == "header" else {}
    body = {"text": "ab", "stream": is_stream, "incremental_streaming_output": True} | (
        {"rid": name} if names == "rid" else {}
    )
    num_started = len(cluster.decode().started)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fetch, cluster, "/generate", body, headers)
        cluster.wait_for(lambda: len(cluster.decode().started) > num_started)
        assert ask(cluster, "POST", "/abort_request", body={"rid": "another"}) == (200, {"num_aborted": 0})
        assert ask(cluster, "POST", "/abort_request", body={"rid": name}) == (200, {"num_aborted": 1})
        status, text = answer.result(100)
    assert status == 499 or (is_stream and status == 200)
    assert "request_aborted" in text
    room = cluster.decode().started[-1].room
    cluster.wait_for(lambda: room in cluster.decode().aborted)


def test_a_call_over_grpc_is_aborted_by_its_id(cluster: Cluster, hang: Any) -> None:
    cluster.decode().faults = [hang(1)]
    num_started = len(cluster.decode().started)
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        request = inference_pb2.GenerateRequest(text="ab", request_id="by-grpc")
        call = inference_pb2_grpc.InferenceStub(channel).Generate.future(request)
        cluster.wait_for(lambda: len(cluster.decode().started) > num_started)
        assert ask(cluster, "POST", "/abort_request", body={"rid": "by-grpc"}) == (200, {"num_aborted": 1})
        assert call.exception(100).code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("tokenize_at", ["router", "worker"])
def test_turns_of_a_session_send_only_what_is_new(start_cluster: Callable[..., Cluster], tokenize_at: str) -> None:
    cluster = start_cluster(tokenize_at=tokenize_at)
    cluster.script = "Hi!"
    session = ask(cluster, "POST", "/open_session", body={"capacity_of_str_len": 1000})[1]

    def turn(name: str, text: str, **follow: Any) -> Any:
        body = {"text": text, "rid": name, "session_params": {"id": session, **follow}}
        status, answer = ask(cluster, "POST", "/generate", body=body)
        assert (status, answer["meta_info"]["id"]) == (200, name)
        return answer["meta_info"]["prompt_tokens"]

    assert [turn("a", "abc"), turn("b", "de", rid="a"), turn("c", "f", rid="a", drop_previous_output=True)] == [3, 9, 4]
    legs = [list(leg.prompt_token_ids) for leg in cluster.prefill().started]
    assert legs[1] == [*cluster.tokenizer.encode("abcHi!"), 256, *cluster.tokenizer.encode("de")]
    assert ask(cluster, "POST", "/close_session", body={"session_id": session}) == (200, {"was_open": True})
    body = {"text": "x", "session_params": {"id": session}}
    assert ask(cluster, "POST", "/generate", body=body)[1]["error"]["param"] == "session_params.id"


def test_a_turn_has_one_prompt_and_one_output(cluster: Cluster) -> None:
    params = {"id": "s"}
    for body in ({"text": ["a", "b"]}, {"text": "a", "sampling_params": {"n": 2}}):
        status, answer = ask(cluster, "POST", "/generate", body={**body, "session_params": params})
        assert (status, answer["error"]["param"]) == (400, "session_params")


def test_a_turn_that_is_refused_for_want_of_a_place_is_not_looked_up(
    start_cluster: Callable[..., Cluster], hang: Any
) -> None:
    cluster = start_cluster(max_concurrent=1, max_queued=0)
    cluster.decode().faults = [hang(1)]
    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(fetch, cluster, "/generate", {"text": "abc"}, {})
        cluster.wait_until(lambda: len(cluster.decode().started) == 1)
        turn = {"text": "x", "session_params": {"id": "no such session"}}
        assert ask(cluster, "POST", "/generate", body=turn)[0] == 429
        cluster.release(cluster.decode())
        assert runs.result(100)[0] == 200


def fetch(cluster: Cluster, path: str, body: Any, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(cluster.url.removeprefix("http://"), timeout=200)
    connection.request("POST", path, json.dumps(body), headers)
    with connection.getresponse() as answer:
        found = answer.status, answer.read().decode()
    connection.close()
    return found


def entry(name: str, key: str, settings: str = "") -> str:
    return f'[{name}]\nsha256 = "{digest_of(key).hex()}"\n{settings}\n'


def test_a_key_aborts_its_own_requests_only_and_an_admins_those_of_all(
    start_cluster: Callable[..., Cluster], tmp_path: Path, hang: Any
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", "a-key") + entry("bob", "b-key") + entry("ops", "o-key", "admin = true"))
    cluster = start_cluster(api_keys_file=path)
    assert [ask(cluster, "POST", act, "a-key")[0] for act in ACTS] == [403] * 3
    assert [ask(cluster, "GET", each, "a-key")[0] for each in ("/get_server_info", "/get_model_info")] == [403, 200]
    assert ask(cluster, "POST", "/flush_cache", "o-key")[0] == 200
    cluster.decode().faults = [hang(1), hang(1)]
    with ThreadPoolExecutor(2) as pool:
        mine, others = (
            pool.submit(fetch, cluster, "/generate", {"text": "ab", "rid": "r"}, {"authorization": f"Bearer {key}"})
            for key in ("a-key", "b-key")
        )
        cluster.wait_for(lambda: len(cluster.decode().started) == 2)
        assert ask(cluster, "POST", "/abort_request", "a-key", {"abort_all": True})[1] == {"num_aborted": 1}
        assert mine.result(100)[0] == 499
        assert not others.done()
        assert ask(cluster, "POST", "/abort_request", "o-key", {"rid": "r"})[1] == {"num_aborted": 1}
        assert others.result(100)[0] == 499


def test_with_a_token_acts_are_for_its_holder_and_reach_workers_in_his_name(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster(trust=Trust(Tokens.of_variable("t" * 32), None))
    assert [ask(cluster, "POST", act)[0] for act in ACTS] == [401] * 3
    assert ask(cluster, "POST", "/abort_request", body={"abort_all": True})[0] == 403
    assert ask(cluster, "POST", "/abort_request", "t" * 32, {"abort_all": True}) == (200, {"num_aborted": 0})
    assert ask(cluster, "POST", "/flush_cache", "t" * 32)[0] == 200
    assert {header for worker in cluster.workers for header in worker.admin.authorizations} == {f"Bearer {'t' * 32}"}


def crowd(cluster: Cluster) -> int:
    """Have workers whose pools hold 100 pages each; return how many tokens that is."""
    for worker in cluster.workers:
        worker.instance.load.total_pages = 100
        cluster.report_load(worker, worker.instance.load)
    door = cluster.router.serving.desk.doors[0]
    cluster.wait_until(lambda: door.capacity_tokens == 100 * worker.instance.transfer.layout.page_size > 0)
    return int(door.capacity_tokens)


@pytest.fixture
def crowded(cluster: Cluster) -> Iterator[Cluster]:
    """Sessions that are left open are closed."""
    crowd(cluster)
    yield cluster
    for name in "abc":
        ask(cluster, "POST", "/close_session", body={"session_id": name})


def opened(cluster: Cluster, name: str, tokens: int, key: str = "", **fields: Any) -> tuple[int, Any]:
    body = {"capacity_of_str_len": 100_000, "context_tokens": tokens, "session_id": name, **fields}
    return ask(cluster, "POST", "/open_session", key, body)


def test_a_session_waits_in_line_for_room_and_keeps_its_place(crowded: Cluster) -> None:
    tokens = crowded.router.serving.desk.doors[0].capacity_tokens
    assert opened(crowded, "a", tokens, wait_s=100) == (200, "a")
    status, answer = opened(crowded, "b", tokens, wait_s=0.001)
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert "number 1 in line" in answer["error"]["message"]
    assert opened(crowded, "c", tokens) == (200, "c")  # it does not want to wait, and so has no part in this
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(opened, crowded, "b", tokens, wait_s=100)
        assert crowded.post("/generate", {"text": "abc"})[0] == 200  # nor has who has no session
        assert ask(crowded, "POST", "/close_session", body={"session_id": "a"}) == (200, {"was_open": True})
        assert answer.result(100) == (200, "b")
    metrics = crowded.get("/metrics")[1]
    for words in ("in 1.0", "waiting 0.0", "admitted_total 2.0", "given_up_total 1.0", f"tokens {float(tokens)}"):
        assert f"diptych_router_session_line_{words}" in metrics


def test_who_asks_again_because_the_answer_was_lost_has_the_same_session(crowded: Cluster) -> None:
    door = crowded.router.serving.desk.doors[0]
    tokens = door.capacity_tokens
    assert opened(crowded, "a", tokens, wait_s=100) == (200, "a")
    assert opened(crowded, "a", tokens, wait_s=50) == (200, "a"), "how long it may wait is no part of the session"
    others: list[dict[str, Any]] = [{"wait_s": 100, "capacity_of_str_len": 9}, {"wait_s": 100, "timeout": 9}, {}]
    for fields in others:
        status, answer = opened(crowded, "a", tokens, **fields)
        assert (status, answer["error"]["param"]) == (400, "session_id")
    assert opened(crowded, "a", tokens - 1, wait_s=100)[0] == 400
    assert door.line.num_tokens == tokens
    door.close(Key("", "a"))
    assert opened(crowded, "a", tokens, wait_s=100) == (200, "a")
    assert door.line.num_tokens == tokens, "whatever the line has forgotten counts again"


def test_of_two_calls_that_wait_for_the_same_session_the_latest_has_it(crowded: Cluster) -> None:
    door = crowded.router.serving.desk.doors[0]
    assert opened(crowded, "a", door.capacity_tokens, wait_s=100) == (200, "a")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(opened, crowded, "b", 9, wait_s=100)
        crowded.wait_until(lambda: door.num_calls == 1)
        second = pool.submit(opened, crowded, "b", 9, wait_s=100)
        assert first.result(100)[0] == 409
        ask(crowded, "POST", "/close_session", body={"session_id": "a"})
        assert second.result(100) == (200, "b")


def test_a_session_that_could_not_be_opened_behind_its_wait_has_no_room(
    crowded: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = crowded.router.serving.desk.doors[0]
    assert opened(crowded, "a", door.capacity_tokens, wait_s=100) == (200, "a")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(opened, crowded, "b", 9, wait_s=100)
        crowded.wait_until(lambda: door.num_calls == 1)
        assert opened(crowded, "c", 9) == (200, "c")
        monkeypatch.setattr("diptych.router.values.kept_sessions.MAX_OF_ALL", 1)
        assert opened(crowded, "d", 9, wait_s=100)[0] == 429, "before it waits"
        ask(crowded, "POST", "/close_session", body={"session_id": "a"})
        assert answer.result(100)[0] == 429
    assert door.line.num_in == door.line.num_waiting == 0


def test_a_session_that_is_open_and_asked_for_no_room_is_refused_before_it_waits(crowded: Cluster) -> None:
    door = crowded.router.serving.desk.doors[0]
    assert opened(crowded, "a", 9) == (200, "a")
    assert opened(crowded, "a", 9)[0] == 400, "as in SGLang"
    assert opened(crowded, "a", 9, wait_s=100)[0] == 400
    assert door.line.num_in == door.line.num_waiting == 0


def test_a_key_that_holds_its_share_waits_behind_another(start_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", "a-key") + entry("bob", "b-key"))
    cluster = start_cluster(api_keys_file=path)
    tokens = crowd(cluster) // 2
    for name, status in (("a", 200), ("b", 200), ("c", 503)):
        assert opened(cluster, name, tokens, "a-key", wait_s=100 if status == 200 else 0.001)[0] == status
    assert opened(cluster, "c", tokens, "b-key", wait_s=0.001)[0] == 503, "a name of another key is another session"
    assert ask(cluster, "POST", "/close_session", "a-key", {"session_id": "a"})[1] == {"was_open": True}
    assert opened(cluster, "c", tokens, "a-key", wait_s=0.001)[0] == 503
    assert opened(cluster, "c", tokens, "b-key", wait_s=100) == (200, "c")


def test_any_api_tells_how_much_context_a_session_has(crowded: Cluster) -> None:
    door = crowded.router.serving.desk.doors[0]
    assert opened(crowded, "a", door.capacity_tokens, wait_s=100) == (200, "a")
    crowded.complete("abc")
    assert door.line.num_tokens == door.capacity_tokens
    crowded.post("/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 5}, {"x-diptych-session": "a"})
    crowded.wait_until(lambda: 0 < door.line.num_tokens < 30)  # once its answer has been written


def test_a_session_whose_first_request_waits_for_long_before_it_runs_keeps_its_room(
    start_cluster: Callable[..., Cluster], hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start_cluster(max_concurrent=1)
    crowd(cluster)
    cluster.decode().faults = [hang(1)]
    door, body = cluster.router.serving.desk.doors[0], {"text": "abc"}
    assert opened(cluster, "a", door.capacity_tokens, wait_s=100) == (200, "a")
    with ThreadPoolExecutor(2) as pool:
        runs = pool.submit(fetch, cluster, "/generate", body, {})
        cluster.wait_until(lambda: len(cluster.decode().started) == 1)
        waits = pool.submit(fetch, cluster, "/generate", body, {"x-diptych-session": "a"})
        cluster.wait_until(lambda: cluster.router.serving.shared.admission.num_waiting == 1)
        monkeypatch.setattr(door, "_clock", lambda: time.monotonic() + 2 * TICKET_S)
        assert opened(cluster, "b", 1, wait_s=0.001)[0] == 503, "there is no room: a's is not given away"
        assert not waits.done()
        cluster.release(cluster.decode())
        assert [runs.result(100)[0], waits.result(100)[0]] == [200, 200]


@pytest.mark.parametrize("fields", [{"wait_s": -1}, {"wait_s": 601}, {"wait_s": "x"}, {"context_tokens": 0}])
def test_words_of_the_line_that_make_no_sense_are_refused(cluster: Cluster, fields: Any) -> None:
    status, answer = ask(cluster, "POST", "/open_session", body={"capacity_of_str_len": 9, **fields})
    assert (status, answer["error"]["param"]) == (400, next(iter(fields)))


def test_the_place_of_a_client_that_leaves_the_line_is_not_taken(crowded: Cluster) -> None:
    door = crowded.router.serving.desk.doors[0]
    assert opened(crowded, "a", door.capacity_tokens, wait_s=100) == (200, "a")
    connection = http.client.HTTPConnection(crowded.url.removeprefix("http://"), timeout=200)
    connection.request("POST", "/open_session", json.dumps({"capacity_of_str_len": 9, "session_id": "b", "wait_s": 99}))
    crowded.wait_until(lambda: door.num_calls == 1)
    connection.close()
    crowded.wait_until(lambda: door.num_calls == 0)
    ask(crowded, "POST", "/close_session", body={"session_id": "a"})
    assert crowded.router.serving.desk.sessions.close("", "b") is False


@pytest.fixture
def stub(crowded: Cluster) -> Iterator[Any]:
    with grpc.insecure_channel(crowded.grpc_target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def asked(name: str, **fields: Any) -> Any:
    return inference_pb2.OpenSessionRequest(session_id=name, capacity_of_str_len=100_000, **fields)


def test_a_session_is_opened_used_and_closed_over_grpc_in_the_same_line(crowded: Cluster, stub: Any) -> None:
    door = crowded.router.serving.desk.doors[0]
    assert stub.OpenSession(asked("a", wait_s=100, context_tokens=door.capacity_tokens)).session_id == "a"
    with pytest.raises(grpc.RpcError, match="number 1 in line") as refused:
        stub.OpenSession(asked("b", wait_s=0.001))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.trailing_metadata())["retry-after"] == "5"
    waits = stub.OpenSession.future(asked("b", wait_s=100))
    crowded.wait_until(lambda: door.num_calls == 1)
    answers = [stub.CloseSession(inference_pb2.CloseSessionRequest(session_id=name)).was_open for name in "ac"]
    assert answers == [True, False]
    assert waits.result(100).session_id == "b"
    assert ask(crowded, "POST", "/close_session", body={"session_id": "b"}) == (200, {"was_open": True})


def test_turns_over_grpc_send_only_what_is_new(crowded: Cluster, stub: Any) -> None:
    crowded.script = "Hi!"
    name = stub.OpenSession(asked("")).session_id

    def turn(request_id: str, text: str, **follow: Any) -> int:
        params = inference_pb2.SessionParams(id=name, **follow)
        request = inference_pb2.GenerateRequest(text=text, request_id=request_id, session_params=params)
        return int(stub.Generate(request).usage.prompt_tokens)

    assert [turn("a", "abc"), turn("b", "de", rid="a"), turn("c", "f", rid="a", drop_previous_output=True)] == [3, 9, 4]
    assert ask(crowded, "POST", "/close_session", body={"session_id": name}) == (200, {"was_open": True})


def test_a_call_over_grpc_that_is_cancelled_or_too_late_waits_no_longer(crowded: Cluster, stub: Any) -> None:
    door = crowded.router.serving.desk.doors[0]
    stub.OpenSession(asked("a", wait_s=100, context_tokens=door.capacity_tokens))
    waits = stub.OpenSession.future(asked("b", wait_s=100))
    crowded.wait_until(lambda: door.num_calls == 1)
    waits.cancel()
    crowded.wait_until(lambda: door.num_calls == 0)
    while door.line.place(Key("", "c")) != 2:  # in time: a busy machine may need more of it
        with pytest.raises(grpc.RpcError) as refused:
            stub.OpenSession(asked("c", wait_s=100), timeout=0.2)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        crowded.wait_until(lambda: door.num_calls == 0)
    assert door.line.place(Key("", "b")) == 1, "the places are kept for a while"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity_of_str_len", 0),
        ("context_tokens", 2**31),
        ("timeout", 3601.0),
        ("wait_s", float("nan")),
        ("session_id", "s" * 129),
    ],
)
def test_what_makes_no_sense_of_a_session_over_grpc_is_refused(stub: Any, field: str, value: Any) -> None:
    request = asked("a")
    setattr(request, field, value)
    with pytest.raises(grpc.RpcError, match=field) as refused:
        stub.OpenSession(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_name_that_no_session_can_have_is_refused_where_one_is_closed(crowded: Cluster, stub: Any) -> None:
    """It would go to the parent of several processes, who reads lines of 64 KiB."""
    with pytest.raises(grpc.RpcError, match="session_id") as refused:
        stub.CloseSession(inference_pb2.CloseSessionRequest(session_id="s" * 129))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ask(crowded, "POST", "/close_session", body={"session_id": "s" * 129})[0] == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 2},
        {"session_params": inference_pb2.SessionParams(id="s" * 129)},
        {"session_params": inference_pb2.SessionParams(id="s", rid="s" * 129)},
        {"chat": inference_pb2.ChatMessages()},
    ],
    ids=["n", "best_of", "name", "turn", "chat"],
)
def test_a_turn_over_grpc_has_one_prompt_and_one_output(stub: Any, fields: Any) -> None:
    fields = {"text": "a", "session_params": inference_pb2.SessionParams(id="s"), **fields}
    if "chat" in fields:
        del fields["text"]
    with pytest.raises(grpc.RpcError, match=r"one prompt|128 characters") as refused:
        stub.Generate(inference_pb2.GenerateRequest(**fields))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
