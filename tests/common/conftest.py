"""Certificates as docs/security.md makes them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from diptych.common.trust.tls import TlsFiles

RECIPE: Final = Path(__file__).parents[2] / "docs" / "security.md"


class Authority:
    """Signs members' certificates, in a folder of its own. `expire=True`: they have ended already."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        found = re.findall(r"```sh\n(openssl req [^`]*)```", RECIPE.read_text())
        self._make_authority, self._make_member = found
        self._run(self._make_authority)

    def sign(self, member: Path, *, name: str = "diptych", days: int = 30) -> TlsFiles:
        """Make a member's files, or replace them."""
        self._run(self._make_member.replace("DNS:diptych", f"DNS:{name}").replace("-days 90", f"-days {days}"))
        member.mkdir(exist_ok=True)
        for made in ("tls.crt", "tls.key", "ca.crt"):
            shutil.copy(self._folder / made, member / made)
        return TlsFiles(member / "tls.crt", member / "tls.key", member / "ca.crt", "diptych")

    def _run(self, script: str) -> None:
        subprocess.run(["sh", "-ec", script], cwd=self._folder, check=True, capture_output=True, timeout=200)


@pytest.fixture
def new_authority(tmp_path: Path) -> Callable[[str], Authority]:
    """`new_authority(name)`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return lambda name: Authority(tmp_path / name)
