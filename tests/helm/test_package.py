"""The chart as a file: packed, signed, pushed to a registry and pulled from it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import chart
import pytest
from http_serving import serving
from registry_server import RegistryServer

NAME = "Diptych Test <test@example.com>"


def helm(*arguments: str, home: Path) -> str:
    environment = {**os.environ, "HELM_CONFIG_HOME": str(home), "HELM_CACHE_HOME": str(home)}
    line = [chart.helm() or "helm", *arguments]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def package(tmp_path: Path) -> Path:
    helm("package", str(chart.CHART), f"--destination={tmp_path}", home=tmp_path)
    (made,) = tmp_path.glob("*.tgz")
    return made


def test_a_package_renders_as_the_folder_does(package: Path) -> None:
    values = f"--values={chart.CHART / 'ci' / 'existing-secrets-values.yaml'}"
    of_package, of_folder = (
        helm("template", "r", str(source), values, home=package.parent) for source in (package, chart.CHART)
    )
    assert of_package == of_folder
    assert "kind: Deployment" in of_package


def test_a_package_goes_through_a_registry_unchanged(package: Path, tmp_path: Path) -> None:
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    with serving(RegistryServer()) as registry:
        where = f"oci://{registry.host}/charts"
        helm("push", str(package), where, "--plain-http", home=tmp_path)
        helm("pull", f"{where}/diptych", "--version=0.1.0", "--plain-http", f"--destination={pulled}", home=tmp_path)
    assert (pulled / package.name).read_bytes() == package.read_bytes()


class Keys:
    """A key pair of GnuPG in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "keys"
        self.folder.mkdir(mode=0o700)
        self.secret, self.public = folder / "secret.gpg", folder / "public.gpg"
        self._gpg("--quick-generate-key", NAME, "rsa2048")
        self.secret.write_bytes(self._gpg("--export-secret-keys"))
        self.public.write_bytes(self._gpg("--export"))

    def close(self) -> None:
        """End the agent that gpg starts."""
        subprocess.run(["gpgconf", f"--homedir={self.folder}", "--kill", "all"], check=True, timeout=60)

    def _gpg(self, *arguments: str) -> bytes:
        options = ("--batch", "--quiet", f"--homedir={self.folder}", "--pinentry-mode=loopback", "--passphrase=")
        return subprocess.run(["gpg", *options, *arguments], capture_output=True, check=True, timeout=60).stdout


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    if not all(map(shutil.which, ("gpg", "gpgconf"))):
        pytest.skip("needs gpg")
    made = Keys(tmp_path)
    yield made
    made.close()


def test_a_signed_package_is_verified_and_a_changed_one_is_not(keys: Keys, tmp_path: Path) -> None:
    sign = ("--sign", f"--key={NAME}", f"--keyring={keys.secret}")
    helm("package", str(chart.CHART), f"--destination={tmp_path}", *sign, home=tmp_path)
    (made,) = tmp_path.glob("*.tgz")
    assert NAME in helm("verify", str(made), f"--keyring={keys.public}", home=tmp_path)
    made.write_bytes(made.read_bytes() + b"\0")
    with pytest.raises(AssertionError, match="sha256 sum does not match"):
        helm("verify", str(made), f"--keyring={keys.public}", home=tmp_path)
