"""What a planner reads of routers and of Kubernetes."""

from __future__ import annotations

import http.server
import json
import math
import socketserver

import pytest
from http_serving import serving
from kubernetes_server import Server

from diptych.cli.planning.sources import cluster_of, counted, counts_of, only_here
from diptych.common.errors import Unavailable
from diptych.common.members.kubernetes_api import KubernetesApi
from diptych.common.members.roles import Role
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import Trust
from diptych.generation.slo import Slo
from diptych.planner.counters import Counts, Finished
from diptych.planner.pools.cluster import Pool
from diptych.planner.values import Goal
from diptych.router.metrics import RouterMetrics
from diptych.router.values.slo_tiers import NO_TIER, Tier, Tiers
from diptych.v1.bootstrap_pb2 import ROLE_ROUTER, Instance


def test_a_routers_page_is_read_as_what_it_counted() -> None:
    metrics = RouterMetrics()
    for api in ("chat", "completions", "tokens"):
        metrics.requests.labels(api, "ok").inc()
        metrics.requests.labels(api, "invalid").inc()
    metrics.finished(NO_TIER, 0.1, 0.01, 1.0)
    metrics.used(100, 40, 30)
    sizes = {32: Finished(1, 100, 40, 30)}
    assert counts_of(metrics.exposition().decode(), Goal()) == Counts(2, 1, 100, 40, 30, 0, 1, 0, sizes)
    metrics._waiting.set(3)
    assert counts_of(metrics.exposition().decode(), Goal())[5:-1] == (3, 1, 3)
    with pytest.raises(ValueError, match="requests_running"):
        counts_of("nothing 1\n", Goal())


def test_what_kept_another_goal_says_nothing_of_ours() -> None:
    slo = Slo(1.0, 0.03)
    metrics = RouterMetrics(Tiers({"default": slo}))
    for ttft_s in (0.5, 1.5):
        metrics.finished(Tier("default", slo), ttft_s, 0.01, 2.0)
    page = metrics.exposition().decode()
    assert counts_of(page, Goal(1.0, 0.03)).within == 1
    assert math.isnan(counts_of(page, Goal(1.0, 0.05)).within)


PAGES = {
    "whole": RouterMetrics().exposition(),
    "cut": b"diptych_router_requests_running",
    "no labels": b"diptych_router_objective_seconds 1\n",
    "no text": b"\xff",
}


class Pages(socketserver.StreamRequestHandler):
    """Answers with the page that is asked for by its port, or with what is no HTTP."""

    page: bytes | None = None

    def handle(self) -> None:
        self.rfile.readline()
        head = f"HTTP/1.0 200 OK\r\nContent-Length: {len(self.page or b'') + 1}\r\n\r\n".encode()
        self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n" if self.page is None else head + self.page + b"\n")


@pytest.mark.parametrize("page", [None, *(PAGES[each] for each in PAGES if each != "whole")])
def test_a_router_whose_answer_is_none_leaves_the_others_answers_as_they_are(page: bytes | None) -> None:
    broken, whole = (type("P", (Pages,), {"page": each}) for each in (page, PAGES["whole"]))
    with (
        serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), broken)) as one,
        serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), whole)) as other,
    ):
        addresses = [f"127.0.0.1:{each.server_address[1]}" for each in (one, other)]
        listed = [Instance(role=ROLE_ROUTER, address=each, metrics_address=each) for each in addresses]
        found = counted(listed, Goal())
        assert only_here(listed, Trust(Tokens.of_variable("secret-of-a-viewer"), None)) == {}
    assert found[addresses[0]] is None
    assert found[addresses[1]] is not None


class Router(http.server.BaseHTTPRequestHandler):
    """Says what is cached by two workers, one of which is not known; to whoever shows a token, and to nobody else."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer secret-of-a-viewer" and self.path == "/admin/workers"
        self.send_response(200 if is_known else 401)
        self.end_headers()
        workers = [{"instance": f"{n:016x}", "only_here_pages": pages} for n, pages in ((10, 7), (11, None))]
        self.wfile.write(json.dumps({"workers": workers}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_the_first_router_that_answers_says_what_only_one_worker_has_cached(caplog: pytest.LogCaptureFixture) -> None:
    trust = Trust(Tokens.of_variable("secret-of-a-viewer"), None)
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router)) as server:
        addresses = ["127.0.0.1:1", f"127.0.0.1:{server.server_port}"]
        listed = [Instance(instance_id=n, role=ROLE_ROUTER, address=each) for n, each in enumerate(addresses, 1)]
        assert only_here(listed, trust) == {10: 7}
        assert "a router at 127.0.0.1:1 does not say" in caplog.text
        assert only_here(listed, Trust(Tokens.of_variable("another-token-that-is-wrong"), None)) == {}


def test_a_cluster_is_read_whether_it_has_keda_or_not(api: KubernetesApi, server: Server) -> None:
    cluster = cluster_of(api, "a=b")
    assert [each.name for each in cluster.pods] == ["a", "b"]
    assert cluster.pools == (Pool("d", ("decode", "default"), Role.DECODE, 2, "77"),)
    assert {path.rpartition("/")[2]: query.get("labelSelector") for path, query in server.asked} == {
        "pods": ["a=b"],
        "deployments": ["a=b"],
        "horizontalpodautoscalers": None,
        "scaledobjects": None,
    }
    kinds = [path.rpartition("/")[2] for path, _ in server.asked]
    assert kinds[-2:] == ["deployments", "pods"]  # whatever pods come or go by, their Deployment is not a newer one
    scaled = {"metadata": {"name": "s"}, "spec": {"scaleTargetRef": {"name": "d"}}}
    server.objects["/apis/keda.sh/v1alpha1/namespaces/llm/scaledobjects"] = [scaled]
    assert cluster_of(api, "").pools[0].hands_off == "KEDA's ScaledObject s scales it"


def test_a_cluster_of_which_some_cannot_be_read_is_no_cluster(api: KubernetesApi, server: Server) -> None:
    server.token = "another"
    with pytest.raises(Unavailable, match="403"):
        cluster_of(api, "a=b")
