"""Commands beside `diptych up`: its user types no address and no token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from diptych.common.trust.tokens import TOKEN_VARIABLE
from diptych.engine.values.step_model import StepModel
from diptych.v1 import bootstrap_pb2

Platform = Any
OPTIONS = ("--model", "sim", "--device", "sim")


def diptych(platform: Platform, *command: str, typed: str = "") -> str:
    """Return what a command prints that runs beside a platform, and has no variable of Diptych."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    environment["XDG_RUNTIME_DIR"] = str(platform.log.parent)
    words = [sys.executable, "-m", "diptych.cli", *command]
    done = subprocess.run(words, env=environment, input=typed, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_need_neither_address_nor_token(
    start_platform: Callable[..., Platform], wait_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    monkeypatch.setenv("DIPTYCH_SIM_TIMING", "none")
    monkeypatch.setenv("DIPTYCH_KV_CACHE_MIB", "16")
    platform = start_platform(options=OPTIONS)
    banner = "In another terminal: `diptych chat`, `diptych status`, `diptych links`."
    wait_for(lambda: banner in platform.log.read_text(), 200.0, "the banner")
    status = diptych(platform, "status")
    assert ["prefill", "1", "1"] in [line.split()[:3] for line in status.splitlines()]
    assert "decode" in diptych(platform, "links")
    assert diptych(platform, "chat", "--temperature=0", typed="hello\n").strip()
    assert diptych(platform, "generate", "--temperature=0", "Once upon a time").strip()
    assert "HTTP and gRPC agree" in diptych(platform, "check", "answers")
    assert "from prefill" in diptych(platform, "check", "kv")
    load = ("--calls=4", "--concurrency=2", "--input-len=20", "--output-len=4")
    assert "4 of 4 served" in diptych(platform, "bench", "serve", *load)
    steps = platform.log.parent / "steps.json"
    assert "sim on sim, KV in" in diptych(platform, "fit", "--out", str(steps), "--max-clients=2", "--max-prompt=64")
    assert StepModel.from_json(steps.read_text()).evidence.num_steps > 100
    (decode,) = [each.address for each in platform.instances() if each.role == bootstrap_pb2.ROLE_DECODE]
    assert "now serves unified" in diptych(platform, "role", decode, "unified")
    assert "empty" in diptych(platform, "drain", "--role", "prefill", "--hurry")
    platform.stop()
    assert list((platform.log.parent / "diptych").iterdir()) == []
