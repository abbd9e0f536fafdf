"""Networks of their own for processes under test, as nodes and pods have them. To make one takes root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from diptych.common.lifecycle import PARENT_PID_VARIABLE

TOOLS: Final = ("unshare", "nsenter", "ip", "mount")
SETUP: Final = "set -e\nmount -t sysfs none /sys\nip link set lo up\n{}\necho done\nexec cat"


@dataclass
class Network:
    """A network, and what runs in it: commands of Diptych with these options, which write logs."""

    pid: int  # of a process that keeps it
    host: str
    folder: Path  # of logs
    options: Mapping[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> None:
        """Begin `diptych` with these arguments."""
        command = self.command(sys.executable, "-m", "diptych.cli", *arguments)
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    def run(self, *arguments: str) -> str:
        """Return what a command prints. One that fails shows all logs."""
        command = self.command(*arguments)
        ended = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=500)
        logs = [f"== {log.name}\n{log.read_text()[-2000:]}" for log in self.folder.iterdir() if log.is_file()]
        assert ended.returncode == 0, "\n".join([ended.stdout, ended.stderr, *logs])
        return ended.stdout

    def log(self, name: str) -> Path:
        return self.folder / name

    def command(self, *arguments: str) -> list[str]:
        """Return what runs a command in the network."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", *arguments]

    @property
    def _environment(self) -> dict[str, str]:
        variables = {f"DIPTYCH_{name}": value for name, value in self.options.items()}
        return {**os.environ, **variables, PARENT_PID_VARIABLE: str(os.getpid())}


@contextlib.contextmanager
def held_network(
    host: str, folder: Path, options: Mapping[str, str], commands: Sequence[str] = ()
) -> Iterator[Network]:
    """Make a network, by these commands in it, and end what runs there. Skips the test where none can be made."""
    if not all(map(shutil.which, TOOLS)):
        pytest.skip("no tools for network namespaces")
    command = ["unshare", "--net", "--mount", "sh", "-c", SETUP.format("\n".join(commands))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "done\n":
            pytest.skip("no network namespace can be made: that takes root")
        network = Network(holder.pid, host, folder, options)
        try:
            yield network
        finally:
            for process in network.processes.values():
                process.terminate()
            for process in network.processes.values():
                process.wait()
            with contextlib.suppress(OSError):
                holder.communicate()
