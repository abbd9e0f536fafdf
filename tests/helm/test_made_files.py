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

OPERATIONS = ROOT / "docs" / "operations"


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
    assert known["kvRequire"]["enum"] == ["any", "shm", "rdma", "nvlink"]
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
    known = {name for page in pages for name in re.findall(r"diptych_[a-z_]+", page.read_text())}
    boards = [path.read_text() for path in (CHART / "dashboards").glob("*.json")]
    asked = set(re.findall(r"diptych_[a-z_]+", "\n".join([*boards, *(each["expr"] for each in alerts())])))
    assert {re.sub("_bucket$", "", name) for name in asked} <= known


@pytest.mark.parametrize("scenario", ["hpa", "keda"])
def test_pools_are_scaled_by_metrics_that_there_are(scenario: str) -> None:
    scalers = [
        each for each in chart.render(scenario=scenario) if each["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}
    ]
    asked = set(
        re.findall(
            r"diptych_[a-z_]+", str([each["spec"].get("metrics", each["spec"].get("triggers")) for each in scalers])
        )
    )
    assert asked
    assert asked <= set(re.findall(r"diptych_[a-z_]+", (OPERATIONS / "autoscaling.md").read_text()))


def test_dashboards_are_config_maps_that_grafana_finds() -> None:
    board = chart.objects(scenario="everything")["ConfigMap/r-llm-dashboard-overview"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["overview.json"])["title"] == "Diptych"


def test_the_alert_for_a_missing_pair_looks_at_each_role() -> None:
    (rule,) = objects("metrics: {rules: {enabled: true}}").of_kind("PrometheusRule")
    (alert,) = [each for each in rule["spec"]["groups"][0]["rules"] if each["alert"] == "DiptychNoPair"]
    ready = 'absent(diptych_router_pool_workers{{namespace="ns",state="ready",role="{}"}})'.format
    assert alert["expr"] == f"{ready('unified')} and on () ({ready('prefill')} or {ready('decode')})"


def test_alerts_can_be_left_out() -> None:
    (rule,) = chart.objects("metrics: {rules: {enabled: true, disabled: [DiptychLinkDown]}}").of_kind("PrometheusRule")
    names = [each["alert"] for each in rule["spec"]["groups"][0]["rules"]]
    assert len(names) == len(alerts()) - 1
    assert "DiptychLinkDown" not in names
