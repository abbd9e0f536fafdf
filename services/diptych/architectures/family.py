"""What makes a model family: how its configuration is read and where the tensors of its checkpoints go.

A family's file describes and computes nothing; the layers compute. So it needs no torch, and a new family is new only
in what it does differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diptych.architectures.config import ModelConfig
from diptych.architectures.hf_config import HfConfig
from diptych.architectures.placement import Placed


@dataclass(frozen=True, slots=True)
class Family:
    """One file of `families`."""

    architecture: str  # as in `config.json`
    read: Callable[[HfConfig], ModelConfig]
    placement: Callable[[ModelConfig], Iterator[Placed]]  # every tensor of a complete checkpoint,
    not_read: Callable[[ModelConfig], tuple[str, ...]] = lambda _: ()  # but those whose names begin so
