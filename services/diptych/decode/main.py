"""The decode worker: `diptych decode`."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.members.roles import Role
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.main import run_worker


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerConfig):
    """Take over computed prompts and generate their output."""


def main(config: DecodeConfig) -> int:
    return run_worker(config, Role.DECODE)
