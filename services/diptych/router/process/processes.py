"""A router as several processes behind the same ports: starts them, starts again what dies, ends them together.

The kernel spreads connections over those that listen (SO_REUSEPORT), so a process that is gone gets none. Each has its
sessions with workers, its index and its line of requests, as routers on different machines have. Two things are counted
together, and the parent keeps both. What the holders of keys use is in shared memory; what a process held there that
died is given back, and the first process charges what other routers tell. The sessions that clients open wait in a line
of the parent's (`session_host`).
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
from functools import partial
from typing import Final

import uvloop

from diptych.common import event_loop, lifecycle
from diptych.common.config import to_flags
from diptych.common.event_loop import LoopHeartbeat
from diptych.common.health.health import HealthServer
from diptych.common.members.heartbeat import DESCRIPTOR_VARIABLE, SharedHeartbeat, new_heartbeat
from diptych.common.net.ports import claim_for_processes, reserve_port
from diptych.common.process_watch import wait_until_out_of_bounds
from diptych.common.shared_memory import SharedMemory
from diptych.common.verdicts.restart_policy import GiveUp, RestartPolicy
from diptych.common.verdicts.watch import ROUTER_PATIENCE_S, Bounds
from diptych.router.config import RouterConfig
from diptych.router.keys.ledger import Ledger, num_bytes
from diptych.router.process.health import ProcessMetrics, ProcessProbes, judge_loop
from diptych.router.process.session_host import SessionHost
from diptych.router.process.share import Share

logger = logging.getLogger(__name__)

STOP_SLACK_S: Final = 8  # beyond the drain, for a process to end


def run_processes(config: RouterConfig) -> int:
    """Run `config.workers` processes until SIGTERM; return the exit code."""
    grace_s = math.ceil(config.drain_s) + STOP_SLACK_S
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(event_loop.run_until_signal(Processes(config).run, grace_s=grace_s))


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
        self._memory = SharedMemory("diptych-keys", num_bytes(config.workers))
        self._ledger = Ledger(config.workers, descriptor=self._memory.descriptor)
        self._sessions = SessionHost(1 + len(config.further_models))
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

    async def run(self, stop: event_loop.Stop) -> int:
        """Return 1 if a process died too often, else 0: all were told to end."""
        config = self._config
        heartbeat = LoopHeartbeat()
        probes = ProcessProbes(config.host, self._health_ports, partial(judge_loop, heartbeat)).probes
        metrics = ProcessMetrics(config.host, self._health_ports)
        words = "%d processes share port %d (HTTP) and port %d (gRPC)"
        logger.info(words, config.workers, config.http_port, config.grpc_port)
        with HealthServer(config.host, config.health_port, probes, metrics.pages()):
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(heartbeat.run()), group.create_task(self._sessions.run())]
                kept = [group.create_task(self._keep(index, stop)) for index in range(config.workers)]
                await asyncio.wait(kept)
                for task in beside:
                    task.cancel()
        for keeper in self._keepers:
            keeper.close()
        self._memory.close()
        return self._exit_code

    async def _keep(self, index: int, stop: event_loop.Stop) -> None:
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
            if await event_loop.wait_or_timeout(stop, decision.delay_s):
                return

    async def _run_once(self, index: int, stop: event_loop.Stop) -> int:
        """Return how a process ended. One that can't be started has died: the others go on."""
        own_end, its_end = socket.socketpair()
        try:
            with new_heartbeat() as (heartbeat, descriptor), its_end:
                process = await self._start(index, descriptor, its_end.fileno())
        except OSError as error:
            own_end.close()
            logger.error("can't start process %d: %s", index, error)
            return 1
        serving = self._sessions.serve(index, own_end)
        beside = [
            asyncio.ensure_future(each)
            for each in (_forward_stop(process, stop), _watch(process, index, heartbeat), serving)
        ]
        try:
            code = await process.wait()
            self._ledger.forget(index)
            return code
        finally:
            for task in beside:
                task.cancel()
            _kill(process)

    async def _start(self, index: int, heartbeat_fd: int, session_fd: int) -> asyncio.subprocess.Process:
        config = replace(self._config, health_port=self._health_ports[index])
        command = (sys.executable, "-m", "diptych.cli", "router", *to_flags(config))
        environment = self._environment(index, heartbeat_fd, session_fd)
        descriptors = (heartbeat_fd, session_fd, self._memory.descriptor)
        return await asyncio.create_subprocess_exec(
            *command, env=environment, pass_fds=descriptors, start_new_session=True
        )

    def _environment(self, index: int, heartbeat_fd: int, session_fd: int) -> Mapping[str, str]:
        share = Share(index, self._ports, self._memory.descriptor, self._ledger.identity, session_fd)
        ours = {lifecycle.PARENT_PID_VARIABLE: str(os.getpid()), DESCRIPTOR_VARIABLE: str(heartbeat_fd)}
        return {**os.environ, **share.environment(), **ours}


async def _watch(process: asyncio.subprocess.Process, index: int, heartbeat: SharedHeartbeat) -> None:
    """End a process that freezes: the kernel would go on to give it its part of the connections."""
    reason = await wait_until_out_of_bounds(process.pid, heartbeat, Bounds(ROUTER_PATIENCE_S))
    logger.error("process %d was ended: %s", index, reason)
    _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _forward_stop(process: asyncio.subprocess.Process, stop: event_loop.Stop) -> None:
    """Pass both words of the stop on."""
    for word in (stop, stop.hurry):
        await word.wait()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
