"""The decode worker: `diptych decode`."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.runtime.worker_config import WorkerConfig
from diptych.engine.runtime.worker_main import WorkerRole, run_worker
from diptych.v1 import bootstrap_pb2

ROLE = WorkerRole("decode", bootstrap_pb2.ROLE_DECODE, "diptych.decode.scheduler")


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerConfig):
    """Take over computed prompts and generate their output."""


def main(config: DecodeConfig) -> int:
    return run_worker(config, ROLE)
