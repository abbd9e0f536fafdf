"""Which processor a process computes on: a CPU, or one GPU that is its own."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from diptych.common.errors import ConfigError


def open_device(wanted: str, gpu: int) -> torch.device:
    """Return the device that `--device` means for the process that GPU number `gpu` is for, and make it current.

    Raises `ConfigError` where it is missing.
    """
    device = torch.device(choose_device(wanted, gpu, torch.cuda.device_count()))
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise ConfigError("a GPU needs Triton: install diptych[gpu], or use --device cpu")
        torch.cuda.set_device(device)
        _use_our_launcher()
    return device


def _use_our_launcher() -> None:
    from diptych.kernels.gpu import launcher  # Triton is not installed everywhere

    launcher.use_it()


def choose_device(wanted: str, gpu: int, num_gpus: int) -> str:
    """Return "cpu", or "cuda:N" where the machine has GPU N. `auto` never means a CPU beside GPUs."""
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        return "cpu"
    if gpu >= num_gpus:
        raise ConfigError(
            f"--device {wanted} needs GPU {gpu} here, but torch sees {num_gpus}: see --base-gpu, --tp and --dp"
        )
    return f"cuda:{gpu}"
