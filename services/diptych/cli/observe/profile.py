"""Trace steps of a running worker by torch's profiler: `diptych profile 127.0.0.1:41234 --steps 20`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc

from diptych.cli.operate.role import find
from diptych.cli.platform.whereabouts import MembersConfig, located
from diptych.cli.requests.asking import members
from diptych.common.config import REQUIRED, argument, option
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.members.instances import name_of
from diptych.common.net.rpc import open_sync_channel
from diptych.v1.admin_pb2 import StartProfileRequest, StopProfileRequest, StopProfileResponse
from diptych.v1.admin_pb2_grpc import WorkerAdminStub

BEGIN_S: Final = 30.0
WRITE_S: Final = 150.0  # beyond the trace, for its file
MAX_STEPS: Final = 1000
MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ProfileConfig(MembersConfig):
    """Trace steps of a running worker by torch's profiler, and say where the file is.

    The worker serves on, more slowly while it is traced. The file stays on the worker's machine: gzipped JSON, for
    https://ui.perfetto.dev or chrome://tracing. Of a tensor-parallel worker rank 0 is traced.
    """

    worker: str = argument(REQUIRED, help="instance id (or how it begins), or host:port as `diptych links` shows it")
    steps: int = option(20, help=f"steps that are traced, at most {MAX_STEPS}")
    skip: int = option(0, help="steps before the first of them")
    max_s: float = option(30.0, help=f"end after so long, whatever has run; at most {MAX_S:g}")

    def validate(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS or self.skip < 0:
            raise ConfigError(f"--steps takes 1 to {MAX_STEPS}, and --skip no negative number")
        if not 0 < self.max_s <= MAX_S:
            raise ConfigError(f"--max-s must be above 0 and at most {MAX_S:g}, not {self.max_s:g}")


class ProfileRefused(DiptychError):
    """The worker made no trace."""


def main(config: ProfileConfig) -> int:
    config = located(config)
    trust = config.trust()
    worker = find(members(config.bootstrap, trust), config.worker)
    start = StartProfileRequest(
        instance_id=worker.instance_id, skip_steps=config.skip, num_steps=config.steps, max_s=config.max_s
    )
    stop = StopProfileRequest(instance_id=worker.instance_id, wait_s=config.max_s)
    with open_sync_channel(worker.address, trust) as channel:
        stub = WorkerAdminStub(channel)
        try:
            stub.StartProfile(start, timeout=BEGIN_S)
            found: StopProfileResponse = stub.StopProfile(stop, timeout=config.max_s + WRITE_S)
        except grpc.RpcError as error:
            raise ProfileRefused(f"{name_of(worker)}: {error.details() or error.code().name}") from None
    print(words(found, worker.address.rpartition(":")[0]))
    return 0


def words(found: StopProfileResponse, host: str) -> str:
    """Return what is said of a trace."""
    size = f"{found.bytes / 1e3:.0f} kB"
    return f"{found.num_steps} steps in {found.duration_s:.2f} s, {size}, on {host}:\n  {found.path}"
