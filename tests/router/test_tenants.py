"""What the holder of one key notices of another: nothing in caches, and no priority that it was not given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.router.keys.keyring import digest_of
from diptych.v1 import inference_pb2, inference_pb2_grpc

Cluster = Any
GROUP = 'share_cache = "bob"'
KEYS = {"alice": "", "bob": "", "carol": GROUP, "dave": GROUP, "ops": "max_priority = 5"}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/generate": {"text": "p"},
}
WITH_PRIORITY = ("/v1/completions", "/v1/chat/completions", "/generate")
GRPC = "diptych.v1.Inference/Generate"
PAGE = 16
PROMPT = "x" * (8 * PAGE + 1)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key of {name}"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = [f'[{name}]\nsha256 = "{digest_of(f"key of {name}").hex()}"\n{more}\n' for name, more in KEYS.items()]
    path.write_text("".join(entries))
    return path


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Callable[..., Cluster], keys: Path) -> Cluster:
    return start_shared_cluster(api_keys_file=keys, policy="pair_cost", special_tokens=["<|turn|>"])


def generate(cluster: Cluster, name: str, **fields: Any) -> Any:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        metadata = [("authorization", bearer(name)["authorization"])]
        return inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="p", **fields), metadata=metadata
        )


def namespace(cluster: Cluster, api: str, name: str, **fields: Any) -> bytes:
    """Return the one that both legs of a request name."""
    before = len(cluster.prefill().started), len(cluster.decode().started)
    if api == GRPC:
        assert generate(cluster, name, **fields).text == "Hello!"
    else:
        status, answer = cluster.post(api, {**BODIES[api], **fields}, bearer(name))
        assert status == 200, answer
    (prefill,), (decode,) = cluster.prefill().started[before[0] :], cluster.decode().started[before[1] :]
    assert prefill.cache_salt == decode.cache_salt
    return bytes(prefill.cache_salt)


def cached_tokens(cluster: Cluster, name: str, request_id: str, **fields: Any) -> set[int]:
    """Return how much of the prompt the router believes workers to have, when it chooses among them."""
    body = {"prompt": PROMPT, "max_tokens": 4, **fields}
    assert cluster.post("/v1/completions", body, {**bearer(name), "x-request-id": request_id})[0] == 200
    (request,) = cluster.router.dispatcher.explanations.find(request_id)["requests"]
    (attempt,) = request["attempts"]
    return {worker["cached_tokens"] for worker in attempt["workers"]}


@pytest.mark.parametrize("api", [*BODIES, GRPC])
def test_each_api_divides_the_prefix_cache_by_key_and_salt_but_for_keys_of_a_group(cluster: Cluster, api: str) -> None:
    alices = namespace(cluster, api, "alice")
    assert namespace(cluster, api, "alice") == alices
    others = [namespace(cluster, api, name) for name in ("bob", "carol", "dave", "ops")]
    assert others[1] == others[2]  # of the group, which has a key's name
    salted = [namespace(cluster, api, name, cache_salt="salt") for name in ("alice", "bob")]
    assert len({alices, *others, *salted}) == 6


def test_the_router_sends_nobody_to_what_another_key_has_cached(cluster: Cluster) -> None:
    assert cached_tokens(cluster, "alice", "first") == {0}
    assert cached_tokens(cluster, "bob", "other") == {0}
    assert cached_tokens(cluster, "alice", "salted", cache_salt="salt") == {0}
    assert cached_tokens(cluster, "alice", "again") == {8 * PAGE}
    assert cached_tokens(cluster, "carol", "in-group") == {0}
    assert cached_tokens(cluster, "dave", "in-group-too") == {8 * PAGE}


def known_chars(cluster: Cluster, name: str) -> int:
    """Return how many characters of a text were not made into tokens anew."""
    cache = cluster.router.preparer.tokenization.cache
    before = cache.known_chars
    assert cluster.post("/tokenize", {"prompt": "<|turn|>a long text that others know"}, bearer(name))[0] == 200
    return int(cache.known_chars - before)


def test_a_text_that_another_key_sent_is_tokenised_again(cluster: Cluster) -> None:
    counts = [known_chars(cluster, name) for name in ("alice", "bob", "alice", "carol", "dave")]
    assert [count > 0 for count in counts] == [False, False, True, False, True]


@pytest.mark.parametrize("api", WITH_PRIORITY)
def test_a_priority_beyond_the_keys_is_refused_with_the_limit(cluster: Cluster, api: str) -> None:
    allowed = {"alice": (0, -100), "ops": (5, -100)}
    for name, priorities in allowed.items():
        for priority in priorities:
            assert cluster.post(api, {**BODIES[api], "priority": priority}, bearer(name))[0] == 200
        status, answer = cluster.post(api, {**BODIES[api], "priority": priorities[0] + 1}, bearer(name))
        words = f"the key '{name}' may ask for a priority of at most {priorities[0]}, not {priorities[0] + 1}"
        assert (status, answer["error"]["param"], words in answer["error"]["message"]) == (400, "priority", True)


def test_over_grpc_likewise(cluster: Cluster) -> None:
    assert [generate(cluster, "ops", priority=priority).text for priority in (5, -100)] == ["Hello!"] * 2
    for priority, words in ((6, "at most 5, not 6"), (-101, "between -100 and 100")):
        with pytest.raises(grpc.RpcError, match=words) as caught:
            generate(cluster, "ops", priority=priority)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_places_in_line_and_turns_are_shared_among_keys(
    start_cluster: Callable[..., Cluster], keys: Path, hang: Callable[[int], Any]
) -> None:
    cluster = start_cluster(api_keys_file=keys, max_concurrent=1, max_queued=4, max_queue_wait_s=200.0)
    cluster.decode().faults = [hang(1)]
    connections = []
    for number, name in enumerate(["alice"] * 5 + ["bob"] * 3):
        connections.append(cluster.connect(headers=bearer(name)))
        open_ones = min(number, 4), min(number + 1, 5)
        cluster.wait_until(lambda now=open_ones: (admission(cluster).num_waiting, admission(cluster).num_open) == now)
    cluster.wait_until(lambda: 'turned_away_total{reason="full"} 1.0' in cluster.get("/metrics")[1])
    cluster.wait_until(lambda: 'turned_away_total{reason="over_share"} 2.0' in cluster.get("/metrics")[1])
    cluster.release(cluster.decode())
    statuses = []
    for connection in connections:
        with connection.getresponse() as answer:
            statuses.append(answer.status)
        connection.close()
    assert (statuses[:5], sorted(statuses[5:])) == ([200, 200, 200, 429, 429], [200, 200, 429])
    assert [leg.tenant for leg in cluster.decode().started] == ["alice", "alice", "bob", "alice", "bob"]


def admission(cluster: Cluster) -> Any:
    return cluster.router.serving.shared.admission


def test_an_open_api_has_one_namespace_and_all_priorities(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    for fields in ({}, {"cache_salt": "salt", "priority": 100}):
        assert cluster.post("/v1/completions", {"prompt": "p", **fields})[0] == 200
    assert [leg.cache_salt for leg in cluster.decode().started] == [b"", b"salt"]
