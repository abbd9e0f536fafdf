"""Runs the whole platform in the background of a program: `diptych up` behind an object.

    with Runtime() as runtime:
        client = OpenAI(base_url=f"{runtime.url}/v1", api_key="-")

For models without HTTP there is `diptych.engine.Engine`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

from diptych.common.config import env_name
from diptych.common.errors import DiptychError
from diptych.common.lifecycle import PARENT_PID_VARIABLE
from diptych.common.trust.token_files import token_in_file

_NUM_LAST_LINES: Final = 30
_ENDPOINTS: Final = {"HTTP": re.compile(r"^\s*HTTP\s+(http://\S+)/v1$"), "gRPC": re.compile(r"^\s*gRPC\s+(\S+)$")}


class RuntimeFailed(DiptychError):
    """The platform ended, or was not ready in time; the message has its last lines."""


class Runtime:
    """A running platform. It listens on the loopback address only, and ends with `close` or with this process."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        prefill: int = 1,
        decode: int = 1,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Start it and wait until it answers requests.

        `environment` holds options of all components, as `DIPTYCH_KV_CACHE_MIB`; what it lacks comes from our own.
        """
        self._lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._endpoints: dict[str, str] = {}
        self._is_settled = threading.Event()  # it is ready, or has ended
        environ = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid()), **(environment or {})}
        self._files = contextlib.ExitStack()
        if file := self._files.enter_context(token_in_file(environ)):
            environ.setdefault(env_name("auth_token_file"), str(file))
        self._process = subprocess.Popen(
            _command(model, prefill, decode),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_settled.wait(timeout_s)
        if len(self._endpoints) < len(_ENDPOINTS):
            self.close()
            raise RuntimeFailed("the platform did not start:\n" + "\n".join(self._lines))

    @property
    def url(self) -> str:
        """Where HTTP is served, without the API's `/v1`."""
        return self._endpoints["HTTP"]

    @property
    def grpc_target(self) -> str:
        return self._endpoints["gRPC"]

    def close(self) -> None:
        """Stop every component. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._reader.join()
        self._files.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip())
                self._note_endpoint(line)
        self._is_settled.set()

    def _note_endpoint(self, line: str) -> None:
        for name, pattern in _ENDPOINTS.items():
            if found := pattern.match(line):
                self._endpoints[name] = found[1]
        if len(self._endpoints) == len(_ENDPOINTS):
            self._is_settled.set()


def _command(model: str, prefill: int, decode: int) -> list[str]:
    options = {"--prefill": prefill, "--decode": decode, "--http-port": 0, "--grpc-port": 0, "--bootstrap-port": 0}
    flags = [word for flag, value in options.items() for word in (flag, str(value))]
    return [sys.executable, "-m", "diptych.cli", "up", "--model", model, *flags]
