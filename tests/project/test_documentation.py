from __future__ import annotations

import functools
import importlib
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from diptych.cli.main import COMMANDS, named
from diptych.common.config import add_options, new_parser
from diptych.kvtransfer.ucx.binding import PATHS

ROOT = Path(__file__).parents[2]
NOT_HERE = {"diptych/__init__.py", "dist/"}  # decided against; made by a build
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_link_to_a_file_leads_somewhere() -> None:
    dead = {str(page.relative_to(ROOT)): _dead(page) for page in PAGES}
    assert {page: links for page, links in dead.items() if links} == {}


def _dead(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return [target for target in targets if not (page.parent / target).exists()]


@functools.cache
def _endings() -> frozenset[str]:
    """Return the last parts of the path of each file and folder, as many as one likes: `/c.py`, `/b/c.py`, `/b/`."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        paths += [Path(folder, name) for name in names] + [Path(folder, name, "_") for name in folders]
    whole = [f"/{path.relative_to(ROOT).as_posix()}".removesuffix("_") for path in paths]
    return frozenset(path[at.start() :] for path in whole for at in re.finditer("/(?=.)", path))


def _missing(text: str) -> list[str]:
    """Return the paths of sources and folders, in backticks, that nothing in the tree ends with."""
    named = re.findall(r"`([A-Za-z_][\w.-]*(?:/[\w.-]+)*(?:/|\.(?:py|c|h|proto|md)))`", text)
    return [path for path in named if f"/{path}" not in _endings() and path not in NOT_HERE and "NAME" not in path]


def test_every_file_and_folder_that_a_page_names_exists() -> None:
    """The changelog tells of some that are gone."""
    missing = {str(page.relative_to(ROOT)): _missing(page.read_text()) for page in PAGES if page.stem != "CHANGELOG"}
    assert {page: paths for page, paths in missing.items() if paths} == {}


def test_a_file_and_a_folder_that_nobody_has_are_missing() -> None:
    text = "`choose/made_up.py`, `made/up/`; not `fits.py`, `choose/fits.py`, `router/choose/`, `a.b()` or `x/y`"
    assert _missing(text) == ["choose/made_up.py", "made/up/"]


def _commands() -> list[tuple[str, ...]]:
    """Every `diptych ...` command line in a fenced block of the documentation."""
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [[word for word in line if not word.startswith("DIPTYCH_") and word != "&"] for line in lines]
    return [tuple(words[1:]) for words in commands if words and Path(words[0]).name == "diptych"]


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_every_command_in_the_documentation_has_the_options_it_is_shown_with(command: tuple[str, ...]) -> None:
    name, arguments = named(command[0], command[1:])
    parser = new_parser(name)
    add_options(parser, getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].config))
    parser.parse_args(arguments)


def test_every_extra_is_in_the_table_of_getting_started() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "getting-started.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(extras.keys() - {"dev"})


@pytest.mark.parametrize("page", ["concepts/kv-transfer.md", "operations/kv-links.md"])
def test_pages_about_transfers_name_every_path(page: str) -> None:
    rows = re.findall(r"^\| `?(\w+)`? \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert set(PATHS) <= set(rows)
    assert "way" not in rows


PROMISES = {
    "docs/index.md": ("seeds that on CPUs hold",),
    "docs/concepts/sampling.md": ("On GPUs\nkernels are chosen by the size of the batch",),
    "docs/api/http.md": ("on CPUs whatever else runs; on GPUs see",),
}


@pytest.mark.parametrize(("page", "words"), [(page, each) for page, several in PROMISES.items() for each in several])
def test_what_holds_on_cpus_alone_is_not_promised_for_gpus(page: str, words: str) -> None:
    assert words in (ROOT / page).read_text()


def test_every_decision_has_a_number_of_its_own() -> None:
    numbers = [path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")]
    assert len(numbers) == len(set(numbers))
    assert all(re.fullmatch(r"\d{4}", number) for number in numbers)


def test_every_test_that_operators_are_told_of_exists() -> None:
    files = [*(ROOT / "e2e").glob("test_*.py"), *(ROOT / "tests" / "helm").glob("test_*.py")]
    tests = {name for path in files for name in (path.stem, *re.findall(r"def (test_\w+)", path.read_text()))}
    pages = (ROOT / "docs" / "operations").glob("*.md")
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert named <= tests
