"""Other transfer libraries beside ours in `kvtransfer.py`: see `kvtransfer_rival.py`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

RIVALS: Final = {"nixl": "kvtransfer_nixl.py", "mooncake": "kvtransfer_mooncake.py"}


def add_options(parser: argparse.ArgumentParser) -> None:
    for name in RIVALS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter that has {name}: measure it, too")


class Rival:
    """One library's pair of processes."""

    def __init__(self, name: str, python: str, transports: str, pool_nbytes: int) -> None:
        self.name = name
        command = [python, str(Path(__file__).with_name(RIVALS[name])), transports, str(pool_nbytes)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._answer()

    def write(self, piece_nbytes: int) -> float:
        """Return the seconds of writing every byte of its pool once."""
        return float(self._ask({"write": piece_nbytes}))

    def verify(self, piece_nbytes: int) -> None:
        """Raise unless the target holds what was written."""
        if not self._ask({"verify": piece_nbytes}):
            raise RuntimeError(f"{self.name}'s target holds something else than was written")

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, question: dict[str, int]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; its words are above")
        return json.loads(line)


def start(options: argparse.Namespace, transports: str, pool_nbytes: int) -> list[Rival]:
    """Start those whose interpreter was given."""
    given = {name: getattr(options, name) for name in RIVALS}
    return [Rival(name, python, transports, pool_nbytes) for name, python in given.items() if python]
