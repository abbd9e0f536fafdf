"""The prefill worker: `diptych prefill`."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.runtime.worker_config import WorkerConfig
from diptych.engine.runtime.worker_main import WorkerRole, run_worker
from diptych.v1 import bootstrap_pb2

ROLE = WorkerRole("prefill", bootstrap_pb2.ROLE_PREFILL, "diptych.prefill.scheduler")


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerConfig):
    """Compute prompts and hand their KV to decode workers."""


def main(config: PrefillConfig) -> int:
    return run_worker(config, ROLE)
