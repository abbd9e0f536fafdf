"""The images' Dockerfile and what goes into the build, without a builder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.engine.options.store_url import SCHEMES, is_valkey

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
        for listed in re.findall(r'finish\.py "([\w,]+)"', rest)
        for each in listed.split(",")
    }
    assert asked
    assert asked <= set(extras)


@pytest.mark.parametrize("stage", ["build-cpu", "build-cuda"])
def test_workers_of_an_image_can_use_a_store_by_every_scheme_that_there_is(stage: str) -> None:
    (listed,) = re.findall(r'finish\.py "([\w,]+)"', " ".join(rest for _, rest in stages()[stage]))
    needed = {"valkey" if is_valkey(f"{scheme}://kv") else "store" for scheme in SCHEMES}
    assert needed == {"store", "valkey"} & set(listed.split(","))


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


@pytest.mark.integration
def test_the_bill_of_materials_names_each_package_once(tmp_path: Path) -> None:
    for name, license_line in (
        ("One_Two", "License-Expression: MIT"),
        ("three", "Classifier: License :: OSI Approved :: X"),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{license_line}\n")
    printed = subprocess.run(
        [sys.executable, IMAGES / "sbom.py", tmp_path], check=True, capture_output=True, text=True, timeout=200
    ).stdout
    document = json.loads(printed)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert [(each["purl"], each["licenses"][0]["license"]["name"]) for each in document["components"]] == [
        ("pkg:pypi/one-two@1.0", "MIT"),
        ("pkg:pypi/three@1.0", "X"),
    ]


FAKE_DOCKER = """#!/bin/sh
# Answers as docker does, and notes what it was asked.
echo "${0##*/} $*" >> "$CALLS"
case "$1 $2" in
  "version ") exit "${NO_DAEMON:-0}" ;;
  "image inspect") case "$4" in
    "{{.Id}}") echo sha256:$IMAGE_ID ;;
    *RepoDigests*) echo "$5@sha256:$BASE_DIGEST" ;;
    *) echo 5 bytes ;;
  esac ;;
  "run --rm") echo '{"components": [{"purl": "pkg:pypi/x@1"}]}' ;;
esac
"""
IMAGE_ID, BASE_DIGEST = "1" * 64, "2" * 64
Build = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Run `images/build.sh sim` in a copy of what it reads, with a builder that only answers."""
    source = tmp_path / "source"
    for name in ("images", "locks"):
        shutil.copytree(ROOT / name, source / name)
    shutil.copy(ROOT / "pyproject.toml", source)
    (source / ".gitignore").write_text("dist/\n")
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    for program in (docker, docker.with_name("buildah")):
        program.write_text(FAKE_DOCKER)
        program.chmod(0o755)
    (tmp_path / "calls").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-C", str(source)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True, timeout=200)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True, timeout=200
    )

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        known = {"IMAGE_ID": IMAGE_ID, "BASE_DIGEST": BASE_DIGEST, "CALLS": str(tmp_path / "calls")}
        path = f"{docker.parent}:{os.environ['PATH']}"
        env = {**os.environ, **known, "PATH": path, "SIGN_KEY": str(tmp_path / "key"), **environment}
        command = [str(source / "images" / "build.sh"), "sim"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.mark.integration
@pytest.mark.parametrize(("no_daemon", "builder"), [("0", "docker"), ("1", "buildah")])
def test_a_docker_without_a_daemon_is_no_builder(build: Build, tmp_path: Path, no_daemon: str, builder: str) -> None:
    build(NO_DAEMON=no_daemon, BUILDER="")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "docker version"
    assert calls[1].startswith(f"{builder} build ")


@pytest.mark.integration
def test_the_provenance_names_what_an_image_was_made_of(build: Build, tmp_path: Path) -> None:
    assert build(BUILD_OPTIONS="--build-arg MARCH=x86-64-v4").returncode == 0
    dist = tmp_path / "source" / "dist"
    (written,), (bill,) = dist.glob("*.intoto.json"), dist.glob("*.cdx.json")
    document = json.loads(written.read_text())
    definition = document["predicate"]["buildDefinition"]
    made_of = {each["name"]: each["digest"] for each in definition["resolvedDependencies"]}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=dist.parent, check=True, capture_output=True, text=True)
    base = dict(rest.split("=", 1) for name, rest in stages()[""] if name == "ARG")["BASE_IMAGE"]
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert [each["digest"]["sha256"] for each in document["subject"]] == [IMAGE_ID, sha256(bill)]
    assert made_of["sources"] == {"gitCommit": head.stdout.strip()}
    assert made_of[base] == {"sha256": BASE_DIGEST}
    assert made_of["locks/sim.lock"] == {"sha256": sha256(ROOT / "locks" / "sim.lock")}
    assert definition["externalParameters"] == {"target": "sim", "options": "--build-arg MARCH=x86-64-v4"}


@pytest.mark.integration
def test_a_provenance_of_which_a_byte_was_changed_has_no_valid_signature(build: Build, tmp_path: Path) -> None:
    assert build().returncode == 0
    (written,) = (tmp_path / "source" / "dist").glob("*.intoto.json")
    signers = tmp_path / "signers"
    signers.write_text(f"builder {(tmp_path / 'key.pub').read_text()}")
    as_documented = ["ssh-keygen", "-Y", "verify", "-n", "diptych-provenance", "-I", "builder", "-f", str(signers)]

    def verified(data: bytes) -> bool:
        command = [*as_documented, "-s", f"{written}.sig"]
        return subprocess.run(command, input=data, capture_output=True, timeout=200, check=False).returncode == 0

    assert " ".join(as_documented[:7]) in (ROOT / "docs" / "operations" / "images.md").read_text()
    data = written.read_bytes()
    assert verified(data)
    for at in (0, len(data) // 2, len(data) - 1):
        assert not verified(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


PINNED = f"python@sha256:{'3' * 64}"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "may mean another image tomorrow"),
        ({"BASE_IMAGE": "python@sha256:123"}, "may mean another image tomorrow"),
        ({"BASE_IMAGE": PINNED, "BUILD_IMAGE": "python:3.12"}, "python:3.12 may mean another image tomorrow"),
        ({"BASE_IMAGE": PINNED, "SIGN_KEY": ""}, "SIGN_KEY"),
    ],
)
def test_a_release_of_what_can_not_be_told_again_is_refused_before_anything_is_built(
    build: Build, tmp_path: Path, given: dict[str, str], words: str
) -> None:
    done = build(RELEASE="1", **given)
    assert done.returncode == 1
    assert words in done.stderr
    assert (tmp_path / "calls").read_text() == ""


@pytest.mark.integration
def test_a_release_has_its_base_by_digest_and_no_change_without_a_commit(build: Build, tmp_path: Path) -> None:
    done = build(RELEASE="1", BASE_IMAGE=PINNED)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert f"--build-arg BASE_IMAGE={PINNED} --build-arg BUILD_IMAGE={PINNED}" in calls[1]
    (written,) = (tmp_path / "source" / "dist").glob("*.intoto.json")
    assert {"name": PINNED, "digest": {"sha256": "3" * 64}} in json.loads(written.read_text())["predicate"][
        "buildDefinition"
    ]["resolvedDependencies"]
    (tmp_path / "source" / "images" / "Dockerfile").write_text("FROM nothing\n")
    assert "no commit has" in build(RELEASE="1", BASE_IMAGE=PINNED).stderr


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.integration
@pytest.mark.parametrize("script", ["build.sh"])
def test_the_scripts_are_shell(script: str) -> None:
    subprocess.run(["sh", "-n", IMAGES / script], check=True, timeout=200)
