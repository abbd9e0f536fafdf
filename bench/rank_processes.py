"""Ranks that a benchmark measures: processes of its own command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def output_of_ranks(command: Sequence[str], num_ranks: int, timeout_s: float) -> str:
    """Run this Python with `command --rank N` for each rank at once; return what rank 0 prints.

    All have ended then. Raises `SystemExit` where one failed, and `subprocess.TimeoutExpired`.
    """
    own = [sys.executable, *command, "--rank"]
    ranks = [subprocess.Popen([*own, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(num_ranks)]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if failed := [rank.returncode for rank in ranks if rank.returncode]:
        raise SystemExit(f"a rank ended with {failed[0]}")
    return outputs[0]
