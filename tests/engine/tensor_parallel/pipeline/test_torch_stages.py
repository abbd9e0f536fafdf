"""Real stages: processes with gloo between them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("stage.py")
SIZE = 3


def test_a_stage_has_sent_a_chunk_before_the_next_one_wants_it_and_only_the_first_gets_logits(tmp_path: Path) -> None:
    """No stage but the first says anything before it is told to go on: who waited for it would wait for ever."""
    with contextlib.ExitStack() as stack:
        stages = [stack.enter_context(started(number, tmp_path / "store")) for number in range(SIZE)]
        assert said(stages[0]) == "sent 0"
        tell(stages[2])
        tell(stages[1])
        assert [said(stages[0]), said(stages[1]), said(stages[1])] == ["sent 1", "sent 0", "sent 1"]
        assert [said(stage) for stage in stages] == ["logits [2.0] 3", "logits [1.0] 3", "logits [2.0] 3"]
        for stage in stages:
            tell(stage)
    assert [stage.returncode for stage in stages] == [0] * SIZE


def started(number: int, store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(number), str(SIZE), str(store)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(stage: subprocess.Popen[str]) -> str:
    assert stage.stdout is not None
    return stage.stdout.readline().strip()


def tell(stage: subprocess.Popen[str]) -> None:
    assert stage.stdin is not None
    stage.stdin.write("go on\n")
    stage.stdin.flush()
