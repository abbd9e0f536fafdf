"""The locks: every package of every installation by its hashes, at the versions of constraints.txt."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path for path in sorted((ROOT / "locks").glob("*.lock"))}
ENTRY = re.compile(r"([\w.-]+)==([\w.]+)( ; [^\\\n]+)?(?: \\\n +--hash=sha256:[0-9a-f]{64})+")
STALE = "run `make lock`"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(lock: str) -> dict[str, str]:
    return {normal(found[1]): found[2] for found in ENTRY.finditer(LOCKS[lock].read_text())}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_a_version_and_hashes_and_nothing_else_stands_there(lock: str) -> None:
    text = re.sub(r"(?m)^#.*\n", "", LOCKS[lock].read_text())
    assert ENTRY.search(text)
    assert ENTRY.sub("", text).strip() == ""


def test_locks_and_constraints_name_the_same_versions() -> None:
    pinned = constraints()
    locked = [(name, version) for lock in LOCKS for name, version in versions(lock).items()]
    assert [each for each in locked if pinned.get(each[0], each[1]) != each[1]] == [], STALE
    assert pinned.keys() - {name for name, _ in locked} == set(), STALE


def test_what_the_project_asks_for_is_in_the_locks_that_are_installed_for_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    serve = ("build", "sim", "cpu", "serve", "torch")
    rows = {
        ("ucx", "otel"): ("sim",),
        ("ucx", "cpu", "otel", "store", "valkey"): ("sim", "cpu", "torch"),
        ("ucx", "gpu", "nixl", "otel", "store", "valkey"): ("sim", "cpu", "cuda", "torch"),
        ("demo",): serve,
        ("dev",): (*serve, "dev"),
        ("compiler",): ("compiler",),
    }
    for asked, locks in rows.items():
        needed = [*(project["dependencies"] if asked != ("compiler",) else ()), *(n for e in asked for n in extras[e])]
        names = {normal(re.split(r"[<>=\[; ]", need)[0]) for need in needed}
        there = {name for lock in locks for name in versions(lock)}
        assert names - there <= {"diptych"}, (asked, STALE)


@pytest.mark.parametrize("source", ["Makefile", "images/Dockerfile", ".ci/e2e_in"])
def test_a_lock_is_never_installed_without_its_hashes(source: str) -> None:
    text = (ROOT / source).read_text().replace("\\\n", " ").replace("$(INSTALL_LOCKED)", "--require-hashes")
    commands = [part for line in text.splitlines() for part in line.split("&&") if re.search(r" -r |-r ,", part)]
    assert commands
    assert [each for each in commands if "--require-hashes" not in each] == []


@pytest.mark.integration
def test_a_package_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    lock = tmp_path / "one.lock"
    (entry,) = (found[0] for found in ENTRY.finditer(LOCKS["serve"].read_text()) if found[1] == "mdurl")
    lock.write_text(entry + "\n")
    if install(lock, tmp_path / "right"):
        pytest.skip("no package index")
    assert (tmp_path / "right" / "mdurl").is_dir()
    lock.write_text(re.sub(r"sha256:(.)", lambda found: f"sha256:{'1' if found[1] == '0' else '0'}", entry) + "\n")
    assert "DO NOT MATCH THE HASHES" in install(lock, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def install(lock: Path, target: Path) -> str:
    """Return what went wrong."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--require-hashes",
        "--no-deps",
        "--quiet",
        "--target",
        str(target),
    ]
    done = subprocess.run([*command, "-r", str(lock)], capture_output=True, text=True, timeout=300, check=False)
    return done.stderr if done.returncode else ""
