"""What is made of the chart, or says something about it, is what the chart is."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import chart
import make_files
import pytest
import yaml
from chart import CHART, ROOT, objects

from diptych.common.errors import DeadlineExceeded, DiptychError, Unavailable
from diptych.router.errors import outcome_of

OPERATIONS = ROOT / "docs" / "operations"
TOPICS = {"cache", "capacity", "clients", "hand-off", "pools"}
BOARDS = {path.stem: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")}


@pytest.mark.parametrize("path", make_files.made(), ids=lambda path: str(path.name))
def test_schema_and_page_are_made_of_the_values(path: Any) -> None:
    assert path.read_text() == make_files.made()[path], "run `make chart`"


@pytest.mark.parametrize("name", make_files.MANIFESTS)
def test_the_plain_manifests_are_the_chart(name: str) -> None:
    made = make_files.manifest(name, helm=chart.helm() or "helm")
    assert (ROOT / "manifests" / f"{name}.yaml").read_text() == made, "run `make chart`"
    assert "kind: Secret" not in made
    assert "Helm" not in made


def test_chart_and_program_have_one_version() -> None:
    program = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (program, program)


def test_every_value_is_described_where_it_stands() -> None:
    def leaves(entry: make_files.Value) -> Iterator[make_files.Value]:
        return itertools.chain.from_iterable(map(leaves, entry.children)) if entry.children else iter((entry,))

    entries = make_files.values(make_files.VALUES.read_text())
    assert [leaf.path for entry in entries for leaf in leaves(entry) if not leaf.comment] == []


def test_the_schema_knows_every_option_that_the_chart_does_not_set_itself() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["definitions"]["workerOptions"]["properties"]
    assert known["kvRequire"]["enum"] == ["any", "shm", "rdma", "nvlink", None]
    assert not {"port", "advertiseHost", "drainS", "insecure"} & set(known)
    assert "endpointSlices" not in schema["definitions"]["routerOptions"]["properties"], "checkPods gives rights"


def test_the_checklist_has_sixty_five_points_each_done_refused_or_open() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (.+?) \| (\w+) \| (?:(.*) )?\|$", (OPERATIONS / "chart-checklist.md").read_text(), re.M
    )
    assert [int(number) for number, *_ in rows] == list(range(1, 66))
    assert {state for _, _, state, _ in rows} <= {"done", "refused", "open"}
    assert [number for number, _, state, words in rows if state != "done" and not words] == []


def alerts() -> list[dict[str, Any]]:
    (rule,) = chart.objects(scenario="everything").of_kind("PrometheusRule")
    found: list[dict[str, Any]] = rule["spec"]["groups"][0]["rules"]
    return found


def test_every_alert_has_a_heading_in_the_page_that_it_links_to() -> None:
    headings = re.findall(r"^### (\w+)$", (OPERATIONS / "troubleshooting.md").read_text(), re.M)
    assert [each["alert"] for each in alerts()] == headings
    links = [each["annotations"]["runbook_url"] for each in alerts()]
    assert links == [f"docs/operations/troubleshooting.md#{name.lower()}" for name in headings]


def test_alerts_and_dashboards_ask_for_metrics_that_there_are() -> None:
    pages = (ROOT / "docs" / "api" / "metrics.md", OPERATIONS / "autoscaling.md")
    known = {name for page in pages for name in re.findall(r"diptych_[a-z0-9_]+", page.read_text())}
    boards = [path.read_text() for path in (CHART / "dashboards").glob("*.json")]
    asked = set(re.findall(r"diptych_[a-z0-9_]+", "\n".join([*boards, *(each["expr"] for each in alerts())])))
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} <= known


@pytest.mark.parametrize("scenario", ["hpa", "keda"])
def test_pools_are_scaled_by_metrics_that_there_are(scenario: str) -> None:
    scalers = [
        each for each in chart.render(scenario=scenario) if each["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}
    ]
    asked = set(
        re.findall(
            r"diptych_[a-z0-9_]+", str([each["spec"].get("metrics", each["spec"].get("triggers")) for each in scalers])
        )
    )
    assert asked
    assert asked <= set(re.findall(r"diptych_[a-z0-9_]+", (OPERATIONS / "autoscaling.md").read_text()))


def selectors(expression: str) -> list[str]:
    """Return what an expression asks of each metric of ours, within braces."""
    return re.findall(r"diptych_[a-z0-9_]+(?:{([^}]*)})?", expression)


def test_two_releases_in_one_namespace_are_asked_about_apart() -> None:
    """Monitors give the series their release, and every expression names it."""
    found = chart.objects(scenario="everything")
    for kind in ("PodMonitor", "ServiceMonitor"):
        assert {str(each["spec"]["podTargetLabels"]) for each in found.of_kind(kind)} == {
            "['app.kubernetes.io/instance']"
        }
    scalers = chart.objects(scenario="keda").of_kind("ScaledObject")
    queries = [each["metadata"]["query"] for scaler in scalers for each in scaler["spec"]["triggers"]]
    asked = [text for each in (*queries, *(alert["expr"] for alert in alerts())) for text in selectors(each)]
    assert asked
    assert [text for text in asked if 'app_kubernetes_io_instance="r"' not in text] == []
    for board in BOARDS.values():
        targets = [each for panel in board["panels"] for each in panel["targets"]]
        shown = [text for each in targets for text in selectors(each["expr"])]
        assert [text for text in shown if 'app_kubernetes_io_instance=~"$release"' not in text] == []
        assert "release" in [each["name"] for each in board["templating"]["list"]]


def test_dashboards_are_config_maps_that_grafana_finds() -> None:
    found = chart.objects(scenario="everything")
    for topic in TOPICS:
        board = found[f"ConfigMap/r-llm-dashboard-{topic}"]
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(board["data"][f"{topic}.json"])["title"] == f"Diptych: {topic}"


def test_there_is_a_dashboard_for_each_topic_which_leads_to_the_others() -> None:
    assert set(BOARDS) == TOPICS
    assert len({board["uid"] for board in BOARDS.values()}) == len(TOPICS)
    assert all(board["links"][0]["tags"] == board["tags"] for board in BOARDS.values())


def test_the_alert_for_a_missing_pair_looks_at_each_role() -> None:
    (rule,) = objects("metrics: {rules: {enabled: true}}").of_kind("PrometheusRule")
    (alert,) = [each for each in rule["spec"]["groups"][0]["rules"] if each["alert"] == "DiptychNoPair"]
    here = 'namespace="ns",app_kubernetes_io_instance="r"'
    ready = f'absent(diptych_router_pool_workers{{{{{here},state="ready",role="{{}}"}}}})'.format
    assert alert["expr"] == f"{ready('unified')} and on () ({ready('prefill')} or {ready('decode')})"


def alert(name: str, values: str = "") -> dict[str, Any] | None:
    (rule,) = objects(f"metrics: {{rules: {{enabled: true, {values}}}}}").of_kind("PrometheusRule")
    return next((each for each in rule["spec"]["groups"][0]["rules"] if each["alert"] == name), None)


BUDGETS = ("DiptychErrorBudgetSoonGone", "DiptychErrorBudgetShrinks", "DiptychObjectivesBudgetSoonGone")


def test_budgets_are_watched_over_a_long_window_and_a_short_one() -> None:
    """A budget of 1 % for 30 days: 14.4 times as fast uses up 2 % of it in an hour, 6 times 5 % in six hours."""
    found = [alert(name) or {} for name in BUDGETS]
    windows = [re.findall(r"> ([\d.]+) \* sum.rate.[^[]*\[(\w+)\]", each["expr"]) for each in found]
    soon = [("0.144", "1h"), ("0.144", "5m"), ("0.06", "6h"), ("0.06", "30m")]
    assert windows[0] == soon
    assert windows[1] == [("0.03", "24h"), ("0.03", "2h"), ("0.01", "72h"), ("0.01", "6h")]
    assert windows[2] == [("0.72", "1h"), ("0.72", "5m"), ("0.3", "6h"), ("0.3", "30m")]
    none = "objectives: {errorRatio: 0, missedRatio: 0}"
    assert [alert(name, none) for name in BUDGETS] == [None] * 3


def test_failures_and_slow_first_tokens_are_told_beyond_the_objectives() -> None:
    errors, slow = alert("DiptychErrors"), alert("DiptychSlowFirstToken")
    assert errors is not None
    assert slow is not None
    failed = set(re.findall(r'outcome=~"([^"]*)"', errors["expr"])[0].split("|"))
    assert failed == {outcome_of(error("words")) for error in (DiptychError, Unavailable, DeadlineExceeded)}
    assert errors["expr"].split(" > ")[1].startswith("0.01 * sum(rate(diptych_router_requests_total{")
    assert slow["expr"].startswith("histogram_quantile(0.95, ")
    assert slow["expr"].endswith(" > 10")
    stricter = "objectives: {errorRatio: 0.001, firstTokenSeconds: 2.5}"
    assert " > 0.001 * " in (alert("DiptychErrors", stricter) or {})["expr"]
    assert (alert("DiptychSlowFirstToken", stricter) or {})["expr"].endswith(" > 2.5")
    none = "objectives: {errorRatio: 0, firstTokenSeconds: 0}"
    assert (alert("DiptychErrors", none), alert("DiptychSlowFirstToken", none)) == (None, None)


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_no_two_panels_of_a_dashboard_lie_on_each_other(topic: str) -> None:
    board = BOARDS[topic]
    places = [each["gridPos"] for each in board["panels"]]
    squares = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(squares) == len(set(squares))
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])


def test_alerts_can_be_left_out() -> None:
    (rule,) = chart.objects("metrics: {rules: {enabled: true, disabled: [DiptychLinkDown]}}").of_kind("PrometheusRule")
    names = [each["alert"] for each in rule["spec"]["groups"][0]["rules"]]
    assert len(names) == len(alerts()) - 1
    assert "DiptychLinkDown" not in names
