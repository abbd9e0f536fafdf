"""scratch"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

LEFT, RIGHT = 1, 2


@pytest.mark.parametrize("sig", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("count", [0, 40, 300, 3000])
def test_full(make_ucx_end: Any, link: Any, sig: Any, count: int) -> None:
    left, right = make_ucx_end(LEFT, max_operations=10000, heartbeat_s=0.5, heartbeat_misses=4), make_ucx_end(RIGHT)
    link(left, right)
    right.process.send_signal(sig)
    began = time.monotonic()
    if count:
        left.ask("notes", peer=RIGHT, count=count, size=200)
    try:
        left.wait_link(up=False, timeout_s=6.0)
        print("detected", sig, count, time.monotonic() - began, left.events[-1])
    finally:
        right.process.send_signal(signal.SIGCONT)
