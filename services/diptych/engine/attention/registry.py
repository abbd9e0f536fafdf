"""Selects the implementation of attention, and of the arithmetic that goes with it, by name.

torch   gather and scaled-dot-product attention; any dtype
auto    the fastest that this processor and dtype have
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.engine.attention.backend import AttentionBackend
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.loader.config import ModelConfig
from diptych.engine.models.ops import Ops, TorchOps


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute a model."""

    attention: AttentionBackend
    ops: Ops


def choose(name: str, config: ModelConfig, kv: Tensor, num_threads: int) -> Backend:
    """Build the backend called `name`. Raises `ConfigError` where this machine cannot run it."""
    if name == "auto":
        name = "torch"
    if name not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} is not known; auto, {', '.join(BACKENDS)} are")
    return BACKENDS[name](config, kv, num_threads)


def _torch(config: ModelConfig, kv: Tensor, num_threads: int) -> Backend:
    return Backend(TorchAttention(config, kv), TorchOps())


BACKENDS: Final[dict[str, Callable[[ModelConfig, Tensor, int], Backend]]] = {"torch": _torch}
