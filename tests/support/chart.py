"""Renders the chart by Helm, for tests: the same values once."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "helm" / "diptych"
SCENARIOS: Final = tuple(
    sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
)

Object = dict[str, Any]


class Unambiguous(yaml.CSafeLoader):  # type: ignore[misc]  # it has no types
    """Takes no mapping with two values for one key, as strict servers do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key comes twice: {keys}"
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def helm() -> str | None:
    """Return where Helm is: `make` puts it into .helm."""
    return shutil.which("helm") or shutil.which("helm", path=ROOT / ".helm")


def kube_version(scenario: str) -> str:
    """Return the oldest version that a scenario is for, of those that are tested."""
    return "1.33" if scenario == "oci" else "1.28"


@functools.cache
def run(command: str, *arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm with the chart; `values` is YAML."""
    line = [helm() or "helm", command, *arguments, "--values=-"]
    return subprocess.run(line, input=values or "{}", capture_output=True, text=True, timeout=60, check=False)


def template(values: str = "", *, scenario: str = "", kube: str = "") -> subprocess.CompletedProcess[str]:
    """Render with the values of a scenario, and these over them."""
    files = [f"--values={CHART / 'ci' / f'{scenario}-values.yaml'}"] if scenario else []
    version = f"--kube-version={kube or kube_version(scenario)}"
    return run("template", "r", str(CHART), "--namespace=ns", version, *files, values=values)


def render(values: str = "", *, scenario: str = "", kube: str = "") -> list[Object]:
    """Return the objects."""
    rendered = template(values, scenario=scenario, kube=kube)
    assert rendered.returncode == 0, rendered.stderr
    return [each for each in yaml.load_all(rendered.stdout, Unambiguous) if each]


class Objects(Mapping[str, Object]):
    """Rendered objects by "Kind/name". Tests share them, and change nothing."""

    def __init__(self, objects: list[Object]) -> None:
        self._by_name = {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}
        assert len(self._by_name) == len(objects), "two objects have one name"

    def __getitem__(self, name: str) -> Object:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self._by_name.values() if each["kind"] == kind]

    def pods(self) -> dict[str, Object]:
        """Return the pods that there will be: metadata and spec, by the name of what makes them."""
        makers = [*self.of_kind("Deployment"), *self.of_kind("Job"), *self.of_kind("StatefulSet")]
        made = {each["metadata"]["name"]: each["spec"]["template"] for each in makers}
        groups = self.of_kind("LeaderWorkerSet")
        made |= {each["metadata"]["name"]: each["spec"]["leaderWorkerTemplate"]["workerTemplate"] for each in groups}
        return made | {each["metadata"]["name"]: each for each in self.of_kind("Pod")}

    def container(self, name: str) -> Object:
        """Return the first container of a pod."""
        found: Object = self.pods()[name]["spec"]["containers"][0]
        return found


@functools.cache
def objects(values: str = "", *, scenario: str = "", kube: str = "") -> Objects:
    return Objects(render(values, scenario=scenario, kube=kube))
