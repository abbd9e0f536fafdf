"""Decides which processes `diptych up` runs, with which arguments and how many threads. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from diptych.common.net.reachable import bracketed, local_host
from diptych.common.verdicts.watch import ROUTER_PATIENCE_S, Bounds

DRAIN_S: Final = 5  # running requests get this long at the end; less than the supervisor's patience
MIN_MEMORY_BYTES: Final = 2 << 30
MAX_MEMORY_BYTES: Final = 16 << 30

_TRANSPORTS: Final = "DIPTYCH_TRANSPORTS"  # option of workers


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    """Where everything listens; the ports are real ones, never 0."""

    host: str
    http_port: int
    grpc_port: int
    bootstrap_port: int

    @property
    def bootstrap(self) -> str:
        """Where the components of this machine find each other."""
        return f"127.0.0.1:{self.bootstrap_port}"

    @property
    def client_host(self) -> str:
        """The host by which clients on this machine reach the router."""
        return local_host(self.host)

    @property
    def http(self) -> str:
        """Where clients on this machine reach the HTTP API."""
        return f"{bracketed(self.client_host)}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{bracketed(self.client_host)}:{self.grpc_port}"


@dataclass(frozen=True, slots=True)
class Model:
    """What the platform serves; workers and router must agree on it."""

    name: str
    load_format: str = "auto"
    max_model_len: int = 0  # tokens; 0: what it takes
    served_names: Sequence[str] = ()  # for clients
    chat_template: str = ""

    @property
    def options(self) -> dict[str, object]:
        """As options of a component."""
        bound = {"max-model-len": self.max_model_len} if self.max_model_len else {}
        return {"model": self.name, "load-format": self.load_format, **bound}

    @property
    def router_options(self) -> dict[str, object]:
        """The same with those that only a router has."""
        more = {"served-model-name": ",".join(self.served_names), "chat-template": self.chat_template}
        return {**self.options, **{flag: value for flag, value in more.items() if value}}


@dataclass(frozen=True, slots=True)
class Workers:
    """All workers of a role."""

    role: str  # and the command
    count: int
    options: Sequence[str] = ()  # further ones
    leader_ports: Sequence[int] = ()  # of groups over several nodes: one for each worker
    nodes: int = 1  # of each worker, which are processes here: a node would have a machine of its own


@dataclass(frozen=True, slots=True)
class Component:
    """One process: `diptych ARGUMENTS`."""

    name: str  # "prefill#1", and "prefill#1.1" of its next node; the number only where there can be several
    arguments: tuple[str, ...]
    num_threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # beside what it inherits
    bounds: Bounds = field(default_factory=Bounds)


def threads_each(num_threads: int, num_workers: int, num_cores: int) -> int:
    """Return the threads of a worker: as asked for, or (0) an equal share of the cores."""
    return num_threads or max(1, num_cores // max(1, num_workers))


def router_memory(wanted_mib: int, machine_bytes: int) -> int:
    """Return the bytes that the router, and bootstrap, may hold: as asked for, or (0) what they never need."""
    if wanted_mib:
        return wanted_mib << 20
    return min(max(machine_bytes // 4, MIN_MEMORY_BYTES), MAX_MEMORY_BYTES)


def transport_environment(
    workers: Iterable[Workers], environment: Mapping[str, str], *, has_hardware: bool
) -> dict[str, str]:
    """Have workers move KV by shared memory alone, which needs no port, unless other ways are there or wanted."""
    is_chosen = any(word.startswith("--transports") for each in workers for word in each.options)
    return {} if has_hardware or is_chosen or _TRANSPORTS in environment else {_TRANSPORTS: "shm"}


def components(
    model: Model, listen: ListenAddresses, workers: Iterable[Workers], num_threads: int, memory_bytes: int = 0
) -> tuple[Component, ...]:
    """Return the processes of a platform, in the order in which to start them; `memory_bytes` is the router's."""
    bootstrap = _component("bootstrap", "bootstrap", {"host": "127.0.0.1", "port": listen.bootstrap_port})
    return (
        replace(bootstrap, bounds=Bounds(memory_bytes=memory_bytes)),
        *(component for each in workers for component in _workers(each, model, listen, num_threads)),
        replace(_router(model, listen), bounds=Bounds(ROUTER_PATIENCE_S, memory_bytes)),
    )


def _router(model: Model, listen: ListenAddresses) -> Component:
    options = {
        **model.router_options,
        "bootstrap": listen.bootstrap,
        "host": listen.host,
        "http-port": listen.http_port,
        "grpc-port": listen.grpc_port,
        "drain-s": DRAIN_S,
    }
    return _component("router", "router", options)


def _workers(workers: Workers, model: Model, listen: ListenAddresses, num_threads: int) -> Iterable[Component]:
    options = {
        **model.options,
        "bootstrap": listen.bootstrap,
        "host": "127.0.0.1",
        "port": 0,
        "metrics-port": 0,
        "num-threads": num_threads,
        "drain-s": DRAIN_S,
    }
    for number in range(1, workers.count + 1):
        component = _component(f"{workers.role}#{number}", workers.role, options, num_threads)
        component = replace(component, arguments=(*component.arguments, *workers.options))
        yield from (component,) if workers.nodes == 1 else _nodes(component, workers, workers.leader_ports[number - 1])


def _nodes(component: Component, workers: Workers, port: int) -> Iterable[Component]:
    """Yield the processes of a group, the leader first; each takes the GPUs behind those of the node before."""
    num_ranks = _number(workers.options, "tp", 1) * _number(workers.options, "pp", 1)
    base_gpu = _number(workers.options, "base-gpu", 0)
    for node in range(workers.nodes):
        place = {"nnodes": workers.nodes, "node-rank": node, "leader": f"127.0.0.1:{port}"}
        own = _flags({**place, "base-gpu": base_gpu + node * (num_ranks // workers.nodes)})
        name = f"{component.name}.{node}" if node else component.name
        yield replace(component, name=name, arguments=(*component.arguments, *own))


def over_nodes(workers: Workers, nodes: int, ports: Sequence[int], given: Mapping[str, str]) -> Workers:
    """Return workers that are groups over so many nodes; `given`: what the environment says of "tp" and "pp".

    They have as few ranks as nodes can have equally many of, unless it is said how many.
    """
    pp = _value(workers.options, "pp") or given.get("pp") or "1"
    stages = int(pp) if pp.isdecimal() else 1
    tp = _value(workers.options, "tp") or given.get("tp") or str(nodes // math.gcd(nodes, stages))
    return replace(workers, options=(*workers.options, "--tp", tp, "--pp", pp), nodes=nodes, leader_ports=ports)


def _number(options: Sequence[str], name: str, default: int) -> int:
    """Return the number that options say of a flag; what is none, the process refuses in words."""
    value = _value(options, name)
    return int(value) if value.isdecimal() else default


def _value(options: Sequence[str], name: str) -> str:
    """Return what options say of a flag, the last of several; empty: nothing."""
    found = ""
    for word, following in pairwise((*options, "")):
        if word.partition("=")[0] == f"--{name}":
            found = word.partition("=")[2] or following
    return found


def _component(name: str, command: str, options: Mapping[str, object], num_threads: int = 1) -> Component:
    """`health-port 0`: else a variable that says otherwise would give all of them the same one."""
    return Component(name, (command, *_flags({**options, "health-port": 0})), num_threads)


def _flags(options: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(text for flag, value in options.items() for text in (f"--{flag}", str(value)))
