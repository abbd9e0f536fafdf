"""Threads are set before torch is loaded, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.runner import threads

PROGRAM = """
import os, sys
from diptych.engine.runner.threads import configure_threads
assert "torch" not in sys.modules
configure_threads(3)
import torch
print(torch.get_num_threads(), os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.integration
def test_torch_gets_its_threads_and_none_of_them_spins() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["3", "0"]


def test_without_torch_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"diptych\[cpu\].*--device sim"):
        threads.configure_threads(1)
