"""Devices for kernels of GPUs: see `kernel_device`."""

from __future__ import annotations

from kernel_device import device

__all__ = ["device"]
