"""The platforms that are compared: one prefill and one decode worker, two that do both, or two replicas, each on a GPU.

All are real: bootstrap, workers and router are processes. A replica has a bootstrap and a router of its own, so that no
request is shared between two of them; clients take them in turn.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from router_rig.platform import running, wait_until_ready

from diptych.common.net.ports import free_ports

READY_TIMEOUT_S: Final = 150.0  # weights of 16 GB, kernels to compile

Gpus = Sequence[tuple[str, int]]  # of the workers behind one router: role and GPU
PREFILL_AND_DECODE: Final[tuple[Gpus, ...]] = ((("prefill", 0), ("decode", 1)),)
REPLICAS: Final[tuple[Gpus, ...]] = ((("unified", 0),), (("unified", 1),))
TOGETHER: Final[tuple[Gpus, ...]] = ((("unified", 0), ("unified", 1)),)


@dataclass(frozen=True, slots=True)
class Site:
    """What all platforms share."""

    model: str
    worker_options: Mapping[str, Any]  # flags of every worker
    log_level: str = "error"
    with_gpus: bool = True


@dataclass(frozen=True, slots=True)
class Front:
    """A router, and who serves behind it."""

    router: subprocess.Popen[bytes]
    http_port: int
    health_port: int
    others: Sequence[subprocess.Popen[bytes]]
    bootstrap: str  # HOST:PORT


def begin(stack: ExitStack, site: Site, workers: Gpus, role_options: Mapping[str, Mapping[str, Any]]) -> Front:
    """Start a router with its workers, without waiting; they end with `stack`. `router` is a role, too."""
    bootstrap_port, http_port, health_port = free_ports("127.0.0.1", 3)
    bootstrap = f"127.0.0.1:{bootstrap_port}"
    log = {"log-level": site.log_level}
    others = [stack.enter_context(_component("bootstrap", {**log, "port": bootstrap_port, "health-port": 0}))]
    model = {**log, "model": site.model, "load-format": "dummy", "bootstrap": bootstrap}
    for role, gpu in workers:
        options = {**model, "port": 0, "drain-s": 0, **site.worker_options, **role_options.get(role, {})}
        flags = {**options, **({"base-gpu": gpu} if site.with_gpus else {})}
        others.append(stack.enter_context(_component(role, flags)))
    ports = {"http-port": http_port, "grpc-port": 0, "health-port": health_port}
    flags = {**model, **ports, "drain-s": 0, "max-concurrent": 4096, **role_options.get("router", {})}
    router = stack.enter_context(_component("router", flags))
    return Front(router, http_port, health_port, others, bootstrap)


def wait(fronts: Sequence[Front]) -> list[int]:
    """Return the HTTP ports to ask in turn, once all serve. Raises `SystemExit`, at once if a process has ended."""
    for front in fronts:
        wait_until_ready(front.router, front.health_port, READY_TIMEOUT_S, front.others)
    return [front.http_port for front in fronts]


def _component(command: str, options: Mapping[str, Any]) -> Any:
    flags = [f"--{name}={value}" for name, value in options.items()]
    return running("diptych.cli", command, "--insecure", *flags)
