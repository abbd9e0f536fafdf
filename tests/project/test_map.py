"""Holds the pages for developers against the tree: folders, paths and recipes."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVELOP = ROOT / "docs" / "develop"
PACKAGE_ROOTS = ("kernels", "kvtransfer", "proto", "services")
OTHER_ROOTS = ("bench", "docs", "e2e", "helm", "images", "tests")
SOURCES = {".c", ".h", ".proto", ".py"}


def _folders(root: Path) -> list[str]:
    """What the map must name: each folder with sources under the roots of packages, and the other roots as wholes."""
    sources = [path for each in PACKAGE_ROOTS for path in (root / each).rglob("*") if path.suffix in SOURCES]
    packages = {f"{path.parent.relative_to(root)}/" for path in sources}
    return sorted(packages | {f"{each}/" for each in OTHER_ROOTS})


def _rows(page: str) -> list[list[str]]:
    """The cells of each row whose first cell is a folder."""
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.splitlines() if line.startswith("| `")
    ]


def _differences(page: str, folders: list[str]) -> dict[str, list[str]]:
    named = Counter(row[0].strip("`") for row in _rows(page))
    return {
        "not on the map": sorted(set(folders) - named.keys()),
        "not in the tree": sorted(named.keys() - set(folders)),
        "named more than once": sorted(folder for folder, count in named.items() if count > 1),
    }


def _map() -> str:
    return (DEVELOP / "map.md").read_text()


def test_the_map_names_every_folder_once() -> None:
    assert not any(_differences(_map(), _folders(ROOT)).values()), _differences(_map(), _folders(ROOT))


def test_a_folder_that_is_missing_from_the_map_is_noticed(tmp_path: Path) -> None:
    for folder in _folders(ROOT):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "module.py").touch()
    assert not any(_differences(_map(), _folders(tmp_path)).values())
    (tmp_path / "services/diptych/engine/attic").mkdir()
    (tmp_path / "services/diptych/engine/attic/module.py").touch()
    assert _differences(_map(), _folders(tmp_path))["not on the map"] == ["services/diptych/engine/attic/"]


def test_a_folder_that_is_gone_or_named_twice_is_noticed() -> None:
    rows = "| `services/diptych/engine/cache/` | again |\n| `services/diptych/cellar/` | nothing |\n"
    found = _differences(_map() + rows, _folders(ROOT))
    assert found["not in the tree"] == ["services/diptych/cellar/"]
    assert found["named more than once"] == ["services/diptych/engine/cache/"]


def test_every_row_says_in_a_sentence_what_its_folder_is() -> None:
    assert [row[0] for row in _rows(_map()) if not row[-1].endswith(".")] == []


def _crowded(root: Path) -> dict[str, int]:
    """The package folders with more modules than a newcomer takes in at once, beside their `__init__`."""
    modules = (path for each in PACKAGE_ROOTS for path in (root / each).rglob("*.py") if path.stem != "__init__")
    counted = Counter(str(path.parent.relative_to(root)) for path in modules if "_pb2" not in path.stem)
    return {folder: count for folder, count in counted.items() if count > 20}


def test_no_folder_is_crowded() -> None:
    assert _crowded(ROOT) == {}, "make rooms in it (docs/develop/map.md)"


def test_a_crowded_folder_is_noticed(tmp_path: Path) -> None:
    attic = tmp_path / "services/diptych/attic"
    attic.mkdir(parents=True)
    for name in ("__init__", *"abcdefghijklmnopqrst", "u"):
        (attic / f"{name}.py").touch()
    assert _crowded(tmp_path) == {"services/diptych/attic": 21}


def _dotted(folder: str) -> str:
    """`services/diptych/engine/cache/` -> `diptych.engine.cache`."""
    return "diptych" + folder.partition("/diptych")[2].rstrip("/").replace("/", ".")


def test_the_folders_that_the_map_calls_pure_are_those_of_the_contract() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    whole, alone = (each for each in linter["contracts"] if each["name"].startswith("What decides"))
    packages = {_dotted(folder) for folder in _folders(ROOT)} & set(whole["source_modules"])
    kinds = {_dotted(row[0].strip("`")): row[1] for row in _rows(_map()) if len(row) == 4}
    pure = {name for name, kind in kinds.items() if kind.startswith("pure")}
    covered = {name for name in kinds if any(f"{name}.".startswith(f"{package}.") for package in packages)}
    assert pure == covered | {name.removesuffix(".*") for name in alone["source_modules"]}


PAGES = [ROOT / "CONTRIBUTING.md", *sorted(DEVELOP.glob("*.md"))]


def _exists(name: str) -> bool:
    name = name.partition("NAME")[0]  # what follows is for the reader to choose
    return any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_that_developers_are_sent_to_exists(page: Path) -> None:
    roots = "|".join((*PACKAGE_ROOTS, *OTHER_ROOTS, "locks", "manifests"))
    paths = re.findall(rf"`((?:{roots})/[\w./*-]*)`", page.read_text())
    assert [path for path in paths if not _exists(path)] == []


def test_every_link_of_the_page_for_contributors_leads_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "CONTRIBUTING.md").read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_recipe_is_listed() -> None:
    recipes = {path.name for path in DEVELOP.glob("add-*.md")}
    assert recipes <= set(re.findall(r"\((?:docs/develop/)?(add-[\w-]+\.md)\)", (ROOT / "CONTRIBUTING.md").read_text()))


def test_the_house_can_be_read_in_a_day() -> None:
    paths = re.findall(
        r"`([\w./-]+\.(?:py|md))`", (DEVELOP / "reading.md").read_text().partition("## Beside the code")[0]
    )
    assert len(paths) == len(set(paths)) > 20
    assert sum(len((ROOT / path).read_text().splitlines()) for path in paths) < 7000
