"""The unified worker: `diptych unified`."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.members.roles import Role
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.main import run_worker


@dataclass(frozen=True, slots=True)
class UnifiedConfig(WorkerConfig):
    """Serve whole requests, and compute prompts or generate output together with other workers."""


def main(config: UnifiedConfig) -> int:
    return run_worker(config, Role.UNIFIED)
