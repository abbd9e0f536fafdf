from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("kernels", "kvtransfer", "proto", "services")
BROUGHT_ALONG = {"pydantic", "pydantic_core", "starlette", "typing_extensions"}  # by FastAPI
EXTRAS = ("cpu", "ucx", "demo", "dev", "compiler", "otel")  # those that make installs


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.integration
def test_the_generated_code_is_what_the_contracts_generate(tmp_path: Path) -> None:
    contracts = sorted((ROOT / "proto" / "diptych" / "v1").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *outputs, *map(str, contracts)]
    subprocess.run(command, check=True, timeout=60)
    generated = sorted((tmp_path / "diptych" / "v1").iterdir())
    assert len(generated) == 3 * len(contracts)
    stale = [each.name for each in generated if each.read_text() != (contracts[0].parent / each.name).read_text()]
    assert stale == [], "run `make proto`"


def test_the_version_is_written_once(pyproject: dict[str, Any]) -> None:
    stamped = pyproject["project"]["version"]
    assert version("diptych") == stamped, "reinstall: pip install -e ."
    sources = [path for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*.py")]
    assert [path for path in sources if f'"{stamped}"' in path.read_text()] == []


def test_the_changelog_knows_the_version(pyproject: dict[str, Any]) -> None:
    assert f"## {pyproject['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_the_product_imports_is_required_and_not_only_by_tests(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    extras = [each for name, of in project["optional-dependencies"].items() if name != "dev" for each in of]
    required = _names([*project["dependencies"], *extras])
    brought = packages_distributions()
    modules = {name for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*.py") for name in _imported(path)}
    others = sorted(modules - sys.stdlib_module_names - {"diptych"})
    known = {name: {_normal(each) for each in brought.get(name, ())} for name in others}
    assert [name for name, of in known.items() if of and not of & required] == sorted(BROUGHT_ALONG)


def _imported(path: Path) -> Iterator[str]:
    """Yield the first names of what a module imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def test_the_namespace_is_shared_and_every_component_is_typed() -> None:
    """A `diptych/__init__.py` in one source root would hide the components of the others."""
    for root in SOURCE_ROOTS:
        namespace = ROOT / root / "diptych"
        assert not (namespace / "__init__.py").exists()
        components = [path for path in namespace.iterdir() if (path / "__init__.py").exists()]
        assert [path.name for path in components if not (path / "py.typed").exists()] == []


def _names(requirements: list[str]) -> set[str]:
    return {_normal(re.split(r"[<>=\[; ]", requirement)[0]) for requirement in requirements}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_by_name_and_version_alone(pyproject: dict[str, Any]) -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []
    extras = pyproject["project"]["optional-dependencies"]
    wanted = _names([*pyproject["project"]["dependencies"], *(each for extra in EXTRAS for each in extras[extra])])
    assert wanted - {_normal(line.split("==")[0]) for line in lines} == {"diptych"}


@pytest.mark.integration
def test_every_import_contract_is_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


def test_no_modules_import_each_other_in_a_circle(pyproject: dict[str, Any]) -> None:
    """Imports for type checkers count: who reads one module of a circle has to read them all."""
    graph = grimp.build_graph(*pyproject["tool"]["importlinter"]["root_packages"], cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises `CycleError`, which names the modules


def test_no_rule_asks_what_time_it_is() -> None:
    """Clocks jump. Only what is shown to somebody, which of two instances at an address is newer, and how old a worker
    was when a planner began, have a date: where that one is wrong, the planner waits for a minute or does not.
    """
    wall_clock = re.compile(r"time\.time\(|time_ns\(|datetime\.now\(|CLOCK_REALTIME|gettimeofday|time\(NULL\)")
    sources = [path for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*.[pch]*") if path.suffix != ".pyc"]
    found = {path.name for path in sources if path.is_file() and wall_clock.search(path.read_text())}
    shown = {"models.py", "completion_layout.py", "responses_layout.py", "log_view.py", "tracer.py", "chat_template.py"}
    shown |= {"vector_answers.py", "own_files.py", "facts.py"}  # names of files, and clocks that are compared
    assert found == {*shown, "membership_client.py", "request_log.py", "usage_log.py", "planner.py"}
