"""Against an HTTP server that answers as the API server does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_serving import serving
from kubernetes_server import Server

from diptych.common.errors import ConfigError, Unavailable
from diptych.common.members.kubernetes_api import KubernetesApi, in_cluster

PODS = "/api/v1/namespaces/llm/pods"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        yield server


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "namespace").write_text("llm")
    (tmp_path / "token").write_text("first\n")
    return tmp_path


def api(server: Server, account: Path) -> KubernetesApi:
    return KubernetesApi(f"http://127.0.0.1:{server.server_port}", account)


def test_all_pages_are_listed(server: Server, account: Path) -> None:
    listed = list(api(server, account).list("api/v1", "pods", "app=x,role in (prefill, decode)"))
    assert [each["metadata"]["name"] for each in listed] == ["a", "b", "c"]
    labels = ["app=x,role in (prefill, decode)"]
    assert server.asked == [
        (PODS, {"labelSelector": labels, "limit": ["500"]}),
        (PODS, {"labelSelector": labels, "limit": ["500"], "continue": ["page 2"]}),
    ]


def test_a_patch_is_merged_and_a_new_token_is_used_at_once(server: Server, account: Path) -> None:
    kubernetes = api(server, account)
    server.token = "second"
    with pytest.raises(Unavailable, match=r'PATCH .*: 403 pods is forbidden: User "x" cannot list'):
        kubernetes.patch("api/v1", "pods", "a", {})
    (account / "token").write_text("second")
    kubernetes.patch("api/v1", "pods", "a", {"metadata": {"annotations": {"k": "v"}}})
    assert server.patched[-1] == (
        f"{PODS}/a",
        "application/merge-patch+json",
        {"metadata": {"annotations": {"k": "v"}}},
    )


def test_an_answer_that_ends_in_its_middle_is_an_api_that_is_away(server: Server, account: Path) -> None:
    server.promised = 10_000
    with pytest.raises(Unavailable, match="IncompleteRead"):
        list(api(server, account).list("api/v1", "pods", ""))


def test_an_api_that_is_away_and_a_process_outside_of_any_cluster_are_told_in_words(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubernetes = KubernetesApi("http://127.0.0.1:1", account)
    with pytest.raises(Unavailable, match="refused"):
        list(kubernetes.list("api/v1", "pods", ""))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="in a pod only"):
        in_cluster()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigError, match="no service account"):
        in_cluster()
