"""`diptych links`: asks every worker of a running platform for its KV links, and shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import grpc

from diptych.cli.link_report import WorkerReport, as_json, as_text
from diptych.cli.members import members
from diptych.common.config import option
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.worker_pb2 import StatusRequest, WorkerStatus
from diptych.v1.worker_pb2_grpc import WorkerStub

WORKERS: Final = (bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_DECODE)
MAX_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class LinksConfig:
    """Show which workers are linked for KV transfers, over what, how fast, and what is not well.

    The exit code is 1 when a worker does not answer or a link is not up.
    """

    bootstrap: str = option("127.0.0.1:7000", help="address of a bootstrap replica")
    json: bool = option(False, help="print JSON, for programs")
    timeout_s: float = option(5.0, help="for a worker to answer")


def main(config: LinksConfig) -> int:
    """Print the report; return the exit code."""
    reports = ask_all((each for each in members(config.bootstrap) if each.role in WORKERS), config.timeout_s)
    print(json.dumps(as_json(reports), indent=2) if config.json else as_text(reports))
    return 0 if all(report.is_well for report in reports) else 1


def ask_all(workers: Iterable[Instance], timeout_s: float) -> list[WorkerReport]:
    """Ask all workers at once."""
    ordered = sorted(workers, key=lambda worker: (worker.role, worker.address, worker.dp_rank))
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return list(pool.map(lambda worker: _ask(worker, timeout_s), ordered))


def _ask(worker: Instance, timeout_s: float) -> WorkerReport:
    with grpc.insecure_channel(worker.address) as channel:
        try:
            request = StatusRequest(instance_id=worker.instance_id)
            status: WorkerStatus = WorkerStub(channel).GetStatus(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return WorkerReport(worker, None, error.details() or error.code().name)
    return WorkerReport(status.instance, status, "")
