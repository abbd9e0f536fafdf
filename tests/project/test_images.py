"""The images' Dockerfile and what goes into the build, without a builder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
DOCKERFILE = IMAGES / "Dockerfile"
TARGETS = {"sim", "cpu", "cuda"}


def instructions() -> list[tuple[str, str]]:
    """Return (name, rest) of each instruction of the Dockerfile."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, its `FROM` first."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for name, rest in instructions():
        if name == "FROM":
            found[rest.partition(" AS ")[2]] = []
        list(found.values())[-1].append((name, rest))
    return found


def ancestors(stage: str) -> list[str]:
    """Return the stages that an image is made of, itself first."""
    base = stages()[stage][0][1].partition(" AS ")[0] if stage in stages() else ""
    return [stage, *ancestors(base)] if base in stages() else [stage]


def test_every_target_runs_as_a_numbered_user_and_names_its_health_check() -> None:
    assert set(stages()) > TARGETS
    for target in TARGETS:
        lines = [line for stage in reversed(ancestors(target)) for line in stages()[stage]]
        names = [name for name, _ in lines]
        users = [rest for name, rest in lines if name == "USER"]
        assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[-1]), target
        assert {"HEALTHCHECK", "ENTRYPOINT", "LABEL"} <= set(names), target


def test_images_are_made_of_pinned_bases_and_of_stages() -> None:
    arguments = dict(rest.split("=", 1) for name, rest in stages()[""] if name == "ARG")
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", arguments["BASE_IMAGE"])
    for stage, ((_, source), *_) in ((stage, lines) for stage, lines in stages().items() if stage):
        base = source.partition(" AS ")[0]
        assert base in stages() or base in ("${BASE_IMAGE}", "${BUILD_IMAGE}"), stage


def test_nothing_is_fetched_but_by_package_managers() -> None:
    assert [rest for name, rest in instructions() if name == "ADD" or "curl" in rest or "://" in rest] == []


def test_only_the_image_that_needs_it_gets_a_compiler() -> None:
    """The others have nothing but what a build stage made and the base."""
    for target in TARGETS - {"cuda"}:
        runs = [rest for stage in ancestors(target) for name, rest in stages()[stage] if name == "RUN"]
        assert runs == [], target


def test_the_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {
        each
        for _, rest in instructions()
        for listed in re.findall(r'"\.\[([\w,]+)\]"', rest)
        for each in listed.split(",")
    }
    assert asked
    assert asked <= set(extras)


def test_all_that_is_copied_is_let_into_the_build() -> None:
    let_in = {
        line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {
        source.split("/")[0]
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert copied == let_in
    assert [each for each in copied if not (ROOT / each).exists()] == []


def test_the_bill_of_materials_names_each_package_once(tmp_path: Path) -> None:
    for name, license_line in (
        ("One_Two", "License-Expression: MIT"),
        ("three", "Classifier: License :: OSI Approved :: X"),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{license_line}\n")
    printed = subprocess.run(
        [sys.executable, IMAGES / "sbom.py", tmp_path], check=True, capture_output=True, text=True, timeout=30
    ).stdout
    document = json.loads(printed)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert [(each["purl"], each["licenses"][0]["license"]["name"]) for each in document["components"]] == [
        ("pkg:pypi/one-two@1.0", "MIT"),
        ("pkg:pypi/three@1.0", "X"),
    ]


@pytest.mark.parametrize("script", ["build.sh"])
def test_the_scripts_are_shell(script: str) -> None:
    subprocess.run(["sh", "-n", IMAGES / script], check=True, timeout=10)
