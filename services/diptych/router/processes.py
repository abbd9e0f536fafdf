"""A router as several processes behind the same ports: starts them, starts again what dies, ends them together.

The kernel spreads connections over those that listen (SO_REUSEPORT), so a process that is gone gets none. Nothing is
shared: each has its sessions, its index and its limits, as routers on different machines have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import uvloop

from diptych.common import lifecycle
from diptych.common.config import to_flags
from diptych.common.health import HealthServer
from diptych.common.ports import claim_for_processes, reserve_port
from diptych.common.restart_policy import GiveUp, RestartPolicy
from diptych.router.config import RouterConfig
from diptych.router.process_metrics import pages_for_health
from diptych.router.process_probes import ProcessProbes
from diptych.router.share import Share

logger = logging.getLogger(__name__)

STOP_SLACK_S: Final = 8  # beyond the drain, for a process to end


def run_processes(config: RouterConfig) -> int:
    """Run `config.workers` processes until SIGTERM; return the exit code."""
    grace_s = math.ceil(config.drain_s) + STOP_SLACK_S
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(lifecycle.run_until_signal(Processes(config).run, grace_s=grace_s))


class Processes:
    """The processes of one router. `run` until told to stop."""

    def __init__(self, config: RouterConfig, policy: RestartPolicy | None = None) -> None:
        """Claim the ports. Raises `ConfigError` if others have them."""
        self._keepers: list[socket.socket] = []
        ports = ((config.http_port, "--http-port"), (config.grpc_port, "--grpc-port"))
        http_port, grpc_port = (self._claim(config.host, *each) for each in ports)
        self._config = replace(config, http_port=http_port, grpc_port=grpc_port)
        self._policy = policy or RestartPolicy()
        self._ports = [self._reserve(config.host) for _ in range(config.workers)]
        self._health_ports = [self._reserve(config.host) for _ in range(config.workers)]
        self._exit_code = 0

    def _claim(self, host: str, port: int, flag: str) -> int:
        if port == 0:
            return self._reserve(host)
        self._keepers.append(claim_for_processes(host, port, flag=flag))
        return port

    def _reserve(self, host: str) -> int:
        """Return a port that no connection made from here gets while a process is down: a restart needs it again."""
        self._keepers.append(reserve_port(host))
        return int(self._keepers[-1].getsockname()[1])

    async def run(self, stop: lifecycle.Stop) -> int:
        """Return 1 if a process died too often, else 0: all were told to end."""
        config = self._config
        probes = ProcessProbes(config.host, self._health_ports).probes
        words = "%d processes share port %d (HTTP) and port %d (gRPC)"
        logger.info(words, config.workers, config.http_port, config.grpc_port)
        with HealthServer(config.host, config.health_port, probes, pages_for_health(config.host, config.http_port)):
            async with asyncio.TaskGroup() as group:
                kept = [group.create_task(self._keep(index, stop)) for index in range(config.workers)]
                await asyncio.wait(kept)
        for keeper in self._keepers:
            keeper.close()
        return self._exit_code

    async def _keep(self, index: int, stop: lifecycle.Stop) -> None:
        """Run a process, and again when it died. One that ended with 0 was told to, and stays away."""
        deaths_s: list[float] = []
        while (code := await self._run_once(index, stop)) != 0 and not stop.is_set():
            deaths_s.append(time.monotonic())
            decision = self._policy.decide(deaths_s)
            if isinstance(decision, GiveUp):
                logger.error("process %d died %d times: giving up", index, decision.num_deaths)
                self._exit_code = 1
                stop.set()
                return
            logger.warning("process %d died (exit code %d): restarting in %g s", index, code, decision.delay_s)
            if await lifecycle.wait_or_timeout(stop, decision.delay_s):
                return

    async def _run_once(self, index: int, stop: lifecycle.Stop) -> int:
        """Return how a process ended. One that can't be started has died: the others go on."""
        try:
            process = await self._start(index)
        except OSError as error:
            logger.error("can't start process %d: %s", index, error)
            return 1
        telling = asyncio.ensure_future(_tell(process, stop))
        try:
            return await process.wait()
        finally:
            telling.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        config = replace(self._config, health_port=self._health_ports[index])
        command = (sys.executable, "-m", "diptych.cli", "router", *to_flags(config))
        return await asyncio.create_subprocess_exec(*command, env=self._environment(index), start_new_session=True)

    def _environment(self, index: int) -> Mapping[str, str]:
        parent = {lifecycle.PARENT_PID_VARIABLE: str(os.getpid())}
        return {**os.environ, **Share(index, self._ports).environment(), **parent}


async def _tell(process: asyncio.subprocess.Process, stop: lifecycle.Stop) -> None:
    """Pass both words of the stop on."""
    for word in (stop, stop.hurry):
        await word.wait()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
