"""Every query of our dashboards and alerts, over the pages of a real platform: it serves, refuses, loses and drains."""

from __future__ import annotations

import http.client
import json
import math
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import chart
import grpc
import promql
import promtool
import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from promql import NAME, Labels, Scrape

from diptych.common.build_info import register_certificate_expiry
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.trust.tls import Tls
from diptych.v1 import bootstrap_pb2, worker_pb2, worker_pb2_grpc
from diptych.v1.bootstrap_pb2 import ROLE_DECODE

Platform = Any  # the fixture's class: test helpers can't be imported

STEP_S: Final = 30.0  # between two scrapes, as the chart's monitors ask for them
HERE: Final = {"namespace": "ns", "app_kubernetes_io_instance": "r"}  # as the chart is rendered
GRAFANA: Final = {"$namespace": "ns", "$release": "r"}
OUR_LABELS: Final = (*HERE, "pod")  # that Prometheus adds
DASHBOARDS: Final = sorted((chart.CHART / "dashboards").glob("*.json"))
SHARED: Final = "the beginning that all of these share, " * 20


@dataclass
class Watched:
    """A platform and what Prometheus has of it. The time is Prometheus' alone: nobody waits for it."""

    platform: Platform
    wait_for: Callable[..., Any]
    scrapes: list[Scrape] = field(default_factory=list)

    def pages(self) -> Iterator[tuple[str, str]]:
        """Yield the pages of those that answer, each with the name of its pod."""
        for member in self.platform.instances():
            role = bootstrap_pb2.Role.Name(member.role).lower()
            if page := _page(member.metrics_address):
                yield f"{role}-{member.instance_id:016x}", page
        yield "bootstrap-0", self._bootstrap_page()

    def _bootstrap_page(self) -> str:
        (process,) = self.platform.components("bootstrap")
        ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        found = [page for port in ports if (page := _page(f"127.0.0.1:{port}"))]
        return found[0]

    def now(self) -> Mapping[Labels, float]:
        found: dict[Labels, float] = {}
        for pod, page in self.pages():
            found |= promql.samples_of(page, {**HERE, "pod": pod})
        return found

    def scrape(self) -> None:
        self.scrapes.append(Scrape(STEP_S * len(self.scrapes), self.now()))

    def scrape_when(self, condition: Callable[[Mapping[Labels, float]], bool], what: str) -> None:
        """Scrape at a moment at which the samples are as they should."""

        def good() -> Mapping[Labels, float] | None:
            samples = self.now()
            return samples if condition(samples) else None

        self.scrapes.append(Scrape(STEP_S * len(self.scrapes), self.wait_for(good, 200.0, what)))

    def serve(self, count: int = 24, at_once: int = 4) -> None:
        prompts = [SHARED[: 100 * (number % 8)] + f"and number {number}" for number in range(count)]
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(lambda prompt: self.platform.complete(prompt, 8), prompts))

    def crowd(self) -> int:
        """More than there is room for; return how many were turned away."""
        body = {"model": "", "prompt": "hello", "max_tokens": 40}
        with ThreadPoolExecutor(24) as threads:
            answers = list(threads.map(lambda _: self.platform.post("/v1/completions", body)[0], range(24)))
        return answers.count(429)

    def stream(self, number: int, on_first: Callable[[], object]) -> bytes:
        """Return the end of a stream that goes on whatever happens to workers. Calls `on_first` when it has begun."""
        body = {"model": "", "prompt": f"stream {number}", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection(self.platform.url.removeprefix("http://"), timeout=200)
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        answer.readline()
        on_first()
        rest = answer.read()
        connection.close()
        return rest[-16:]

    def while_streams_run(self, act: Callable[[], object]) -> None:
        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(6) as threads:
            streams = [threads.submit(self.stream, number, begun.release) for number in range(6)]
            for _ in streams:
                assert begun.acquire(timeout=200)
            act()
            assert {each.result() for each in streams} == {b"\n\ndata: [DONE]\n\n"}

    def busiest(self, role: int) -> bootstrap_pb2.Instance:
        workers = [each for each in self.platform.statuses() if each.instance.role == role]
        busiest: bootstrap_pb2.Instance = max(workers, key=lambda each: each.open_rooms).instance
        return busiest

    def drain(self, worker: bootstrap_pb2.Instance, deadline_s: float) -> None:
        headers = dict(self.platform.trust().metadata())
        url = f"http://{worker.metrics_address}/drain?deadline_s={deadline_s}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST", headers=headers), timeout=200) as answer:
            assert answer.status == 202

    def call_without_token(self) -> None:
        (worker, *_) = [each for each in self.platform.instances() if each.role in WORKER_ROLES]
        with grpc.insecure_channel(worker.address) as channel, pytest.raises(grpc.RpcError):
            worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.StatusRequest(), timeout=200)


def _page(address: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=200) as answer:
            return str(answer.read().decode())
    except (OSError, http.client.HTTPException, urllib.error.URLError):
        return None


def total(samples: Mapping[Labels, float], name: str, **labels: str) -> float:
    wanted = {(NAME, name), *labels.items()}
    return sum(value for key, value in samples.items() if wanted <= key)


def all_linked(samples: Mapping[Labels, float]) -> bool:
    links = [value for labels, value in samples.items() if (NAME, "diptych_kv_link_up") in labels]
    return len(links) >= 12 and all(links)


@pytest.fixture(scope="module")
def watched(
    platform_class: Callable[..., Platform],
    wait_until: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """A platform after an eventful hour; all of it took place within five minutes of Prometheus' time."""
    limits = {"DIPTYCH_MAX_CONCURRENT": "8", "DIPTYCH_MAX_QUEUED": "4", "DIPTYCH_POLICY": "least_load"}
    running = platform_class(
        tmp_path_factory.mktemp("monitoring") / "log",
        prefill=2,
        decode=2,
        options=("--model", "sim", "--device", "sim", "--unified", "1"),
        DIPTYCH_KV_CACHE_MIB="16",
        DIPTYCH_MOVES="off",  # so that a drain has something to hand back
        **limits,
    )
    try:
        seen = Watched(running, wait_until)
        live(seen)
        yield seen
    finally:
        running.stop()


def live(seen: Watched) -> None:
    """Let happen what panels show, trouble too."""
    seen.scrape_when(all_linked, "all links are up")
    seen.serve()
    seen.scrape()
    seen.wait_for(seen.crowd, 200.0, "somebody is turned away")
    seen.call_without_token()
    seen.scrape()
    seen.while_streams_run(lambda: seen.platform.process_of("decode", seen.busiest(ROLE_DECODE)).kill())
    seen.scrape_when(lambda now: total(now, "diptych_router_retries_total") > 0, "attempts have failed")
    seen.wait_for(lambda: all_linked(seen.now()), 200.0, "the successor is linked")

    def drain() -> None:
        leaving = seen.busiest(ROLE_DECODE)
        seen.drain(leaving, 200.0)
        seen.scrape_when(lambda now: total(now, "diptych_worker_drain_requests_left") > 0, "a worker drains")
        seen.drain(leaving, 0.0)

    seen.while_streams_run(drain)
    seen.scrape_when(lambda now: total(now, "diptych_router_handed_back_total") > 0, "requests were handed back")


def panels() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for variable, value in GRAFANA.items():
                    expression = expression.replace(variable, value)
                yield f"{panel['title']}: {target['legendFormat']}", expression


def alerts() -> dict[str, str]:
    if chart.helm() is None:
        pytest.skip("helm is not installed: `make helm` brings it")
    (rule,) = chart.objects("metrics: {rules: {enabled: true}}").of_kind("PrometheusRule")
    return {each["alert"]: each["expr"] for each in rule["spec"]["groups"][0]["rules"]}


def upto(scrapes: Sequence[Scrape]) -> Iterator[Sequence[Scrape]]:
    """Yield what is known at each moment but the first: no counter has grown before."""
    return (scrapes[: end + 1] for end in range(1, len(scrapes)))


@pytest.mark.parametrize(("name", "expression"), [pytest.param(*each, id=each[0]) for each in panels()])
def test_a_panel_has_something_to_show(watched: Watched, name: str, expression: str) -> None:
    found = [promql.evaluate(expression, known) for known in upto(watched.scrapes)]
    numbers = [value for each in found if isinstance(each, dict) for value in each.values()]
    assert [value for value in numbers if value == value], f"{name} stays empty"


@pytest.mark.parametrize(("name", "expression"), [pytest.param(*each, id=each[0]) for each in panels()])
def test_a_panel_names_each_line_by_labels_that_it_has(name: str, expression: str) -> None:
    assert set(re.findall(r"{{(\w+)}}", name)) <= promql.kept_labels(promql.parse(expression))


def asked(expressions: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield whose query asks which metric for which label."""
    for title, expression in expressions.items():
        node = promql.parse(expression)
        for selector in promql.selectors(node):
            for label, _, _ in selector.matchers:
                yield title, selector.name, label
        for name, label in promql.used_labels(node):
            yield title, name, label


def having(scrapes: Sequence[Scrape]) -> set[tuple[str, str]]:
    """Which metric has which label."""
    series = {labels for scrape in scrapes for labels in scrape.samples}
    return {(dict(labels)[NAME], label) for labels in series for label, _ in labels}


def test_queries_ask_for_metrics_and_labels_that_there_are(watched: Watched) -> None:
    there = having([*watched.scrapes, certificates(0.0)])
    wanted = {**dict(panels()), **alerts()}
    assert [(title, name, label) for title, name, label in asked(wanted) if (name, label) not in there] == []


def test_the_lists_to_choose_from_are_of_labels_that_there_are(watched: Watched) -> None:
    boards = [json.loads(path.read_text())["templating"]["list"] for path in DASHBOARDS]
    queries = [each["query"] for board in boards for each in board if each["type"] == "query"]
    found = [re.fullmatch(r"label_values\((\w+).*, (\w+)\)", query) for query in queries]
    assert found
    assert {each.groups() if each else None for each in found} <= having(watched.scrapes)


# alerts


@dataclass(frozen=True)
class Change:
    """What is different in the last scrape when something is wrong: the rest is as the platform told it."""

    name: str
    labels: Mapping[str, str]
    to: Callable[[float], float | None]  # None: the series has ended

    def apply(self, samples: Mapping[Labels, float]) -> Mapping[Labels, float]:
        wanted = {(NAME, self.name), *self.labels.items()}
        touched = [labels for labels in samples if wanted <= labels]
        assert touched, f"no page has {self.name}{dict(self.labels)}"
        changed = {labels: self.to(samples[labels]) for labels in touched}
        return {labels: value for labels, value in {**samples, **changed}.items() if value is not None}


def change(name: str, to: Callable[[float], float | None], **labels: str) -> Change:
    return Change(f"diptych_{name}", labels, to)


def gone(_: float) -> None:
    return None


def more(count: float) -> Callable[[float], float]:
    return lambda value: value + count


def becomes(value: float) -> Callable[[float], float]:
    return lambda _: value


def certificates(expires_s: float) -> Scrape:
    """The page of a component with a certificate."""
    registry = CollectorRegistry()
    register_certificate_expiry(
        registry, cast(Tls, SimpleNamespace(current=lambda: SimpleNamespace(expires_s=expires_s)))
    )
    return Scrape(0.0, promql.samples_of(generate_latest(registry).decode(), {**HERE, "pod": "worker"}))


WRONG: Final[Mapping[str, Sequence[Change]]] = {
    "DiptychNoPair": [
        change("router_pool_workers", gone, role="decode", state="ready"),
        change("router_pool_workers", gone, role="unified", state="ready"),
    ],
    "DiptychErrors": [change("router_requests_total", more(1), api="chat", outcome="unavailable")],
    "DiptychErrorBudgetSoonGone": [change("router_requests_total", more(9), api="chat", outcome="unavailable")],
    "DiptychErrorBudgetShrinks": [change("router_requests_total", more(2), api="chat", outcome="unavailable")],
    "DiptychObjectivesBudgetSoonGone": [change("router_offered_total", more(200))],
    "DiptychSlowFirstToken": [
        change("router_ttft_seconds_bucket", more(20), le="30.0"),
        *(change("router_ttft_seconds_bucket", more(20), le=le) for le in ("60.0", "120.0", "300.0", "600.0")),
        change("router_ttft_seconds_bucket", more(20), le="+Inf"),
    ],
    "DiptychWorkerSilent": [change("worker_up", becomes(0))],
    "DiptychSchedulerHangs": [change("worker_silent_seconds", becomes(11))],
    "DiptychIntegrityFailure": [change("kv_integrity_failures_total", more(1))],
    "DiptychPageLeak": [change("kv_leaks_found", more(1))],
    "DiptychLinkDown": [change("kv_link_up", becomes(0))],
    "DiptychQuarantine": [change("kv_quarantine_oldest_seconds", becomes(61))],
    "DiptychTurnedAway": [change("router_turned_away_total", more(2), reason="full")],
    "DiptychPrefillBacklog": [change("router_pool_prefill_backlog_seconds", becomes(61), role="prefill")],
    "DiptychDecodeFull": [change("worker_kv_occupancy_ratio", becomes(0.96))],
    "DiptychBreakersOpen": [change("router_breakers_open", becomes(1))],
    "DiptychStranger": [change("auth_refusals_total", more(30), reason="wrong_token")],
    "DiptychCertificateEnds": [change("tls_certificate_expires_timestamp_seconds", becomes(13 * 86400.0))],
    "DiptychBootstrapAway": [change(f"bootstrap_{name}", gone) for name in ("members", "watchers")],
}


def healthy(watched: Watched) -> list[Scrape]:
    """A platform that serves: the same pages with a certificate."""
    return [
        Scrape(scrape.time_s, {**scrape.samples, **certificates(90 * 86400.0).samples})
        for scrape in watched.scrapes[:2]
    ]


def test_there_is_something_wrong_for_each_alert() -> None:
    assert alerts().keys() == WRONG.keys()


@pytest.mark.parametrize("name", WRONG)
def test_an_alert_is_silent_while_all_is_well_and_fires_when_it_should(watched: Watched, name: str) -> None:
    expression, (before, now) = alerts()[name], healthy(watched)
    assert promql.evaluate(expression, [before, now]) == {}
    samples = now.samples
    for each in WRONG[name]:
        samples = each.apply(samples)
    assert promql.evaluate(expression, [before, Scrape(now.time_s, samples)]) != {}


def test_a_bootstrap_replica_that_lists_nobody_is_not_away(watched: Watched) -> None:
    before, now = healthy(watched)
    samples = change("bootstrap_members", gone).apply(now.samples)
    assert promql.evaluate(alerts()["DiptychBootstrapAway"], [before, Scrape(now.time_s, samples)]) == {}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_finds_the_same(watched: Watched, tmp_path: Path) -> None:
    expressions = [*dict(panels()).values(), *alerts().values()]
    scrapes = [Scrape(scrape.time_s, without_ends(scrape.samples)) for scrape in watched.scrapes]
    for end in (2, len(scrapes)):
        theirs = promtool.evaluate(expressions, scrapes[:end], STEP_S, tmp_path)
        for expression, found in zip(expressions, theirs, strict=True):
            ours = promql.evaluate(expression, scrapes[:end])
            assert isinstance(ours, dict)
            named = {frozenset(pair for pair in labels if pair[1]): value for labels, value in ours.items()}
            assert found == pytest.approx(named, rel=1e-9, nan_ok=True), expression


def without_ends(samples: Mapping[Labels, float]) -> Mapping[Labels, float]:
    """Prometheus' own notation of samples knows no infinity; ours are in the labels of buckets alone."""
    return {labels: value for labels, value in samples.items() if math.isfinite(value)}


def test_an_alert_says_whom_it_means_in_labels_that_are_left(watched: Watched) -> None:
    (rule,) = chart.objects("metrics: {rules: {enabled: true}}").of_kind("PrometheusRule")
    before, now = healthy(watched)
    for alert in rule["spec"]["groups"][0]["rules"]:
        samples = now.samples
        for each in WRONG[alert["alert"]]:
            samples = each.apply(samples)
        found = promql.evaluate(alert["expr"], [before, Scrape(now.time_s, samples)])
        assert isinstance(found, dict)
        named = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])) - {"pool"}  # empty: no label
        assert all(named <= dict(labels).keys() for labels in found), alert["alert"]
