"""The prefill worker: `diptych prefill`."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.members.roles import Role
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.main import run_worker


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerConfig):
    """Compute prompts and hand their KV to decode workers."""


def main(config: PrefillConfig) -> int:
    return run_worker(config, Role.PREFILL)
