"""The workers: `diptych prefill`, `decode`, `unified` and `encode`. Each begins in another role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from diptych.common.members.roles import Role
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.main import run_worker


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerConfig):
    """Compute prompts and hand their KV to decode workers."""

    role: ClassVar = Role.PREFILL


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerConfig):
    """Take over computed prompts and generate their output."""

    role: ClassVar = Role.DECODE


@dataclass(frozen=True, slots=True)
class UnifiedConfig(WorkerConfig):
    """Serve whole requests, and compute prompts or generate output together with other workers."""

    role: ClassVar = Role.UNIFIED


@dataclass(frozen=True, slots=True)
class EncodeConfig(WorkerConfig):
    """Encode the images of prompts, which other workers compute."""

    role: ClassVar = Role.ENCODE


def main(config: PrefillConfig | DecodeConfig | UnifiedConfig | EncodeConfig) -> int:
    return run_worker(config, config.role)
