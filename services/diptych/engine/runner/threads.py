"""Sets how many threads compute. Call before torch is first imported.

Rule: threads never spin while they wait. OpenMP's default barrier holds its core until the slowest thread arrives;
with a prefill and a decode worker on the same cores each waits for the other's spinning, at 10 times the cost.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from diptych.common.errors import ConfigError


def configure_threads(num_threads: int) -> None:
    """Let torch compute with `num_threads` threads in this process. Raises `ConfigError` where there is no torch."""
    if find_spec("torch") is None:
        raise ConfigError("no PyTorch: install diptych[cpu], or diptych[gpu]; or give --device sim")
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # read once, when the OpenMP runtime is loaded with torch
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    torch.set_num_threads(num_threads)
