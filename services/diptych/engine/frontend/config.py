"""Flags of a prefill or decode worker."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, Literal

from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogFormat, LogLevel
from diptych.common.members.neighbours import MOVE_LINKS
from diptych.common.members.replicas import check_replicas
from diptych.common.net.reachable import is_loopback, reachable_host
from diptych.common.trust.trust import TrustConfig
from diptych.engine.options.config import EngineOptions, KvBackend, WeightsFrom
from diptych.engine.options.node_place import cuts_stages
from diptych.engine.values.transfer_rules import Integrity, TransferRules
from diptych.kvtransfer.lanes import KvPath, Requirement, Transports

RELEASE_MARGIN_S: Final = 5.0  # for the notes of both sides, once the KV has arrived or given up
EXIT_S: Final = 10.0  # to say goodbye, and for sessions and then schedulers to end, all of them at once


@dataclass(frozen=True, slots=True)
class WorkerConfig(EngineOptions, TrustConfig):
    """A worker: one scheduler with its KV pool, reached by routers over gRPC and by peers over UCX."""

    bootstrap: tuple[str, ...] = option(
        ("127.0.0.1:7000",), help="bootstrap replicas; dns:///NAME:PORT: all behind a name"
    )
    host: str = option("127.0.0.1", help="address to listen on; `::`: every one, of IPv4 too")
    port: int = option(0, help="gRPC port; 0: any free one, peers learn it from bootstrap")
    metrics_port: int = option(0, help="HTTP port of /metrics for Prometheus; 0: any free one, named in the log")
    health_port: int = option(0, help="HTTP port of the probes, /health/live|ready|startup; 0: any free one")
    advertise_host: str = option("", help="host that others reach this worker by; empty: the listening address")
    pool: str = option("", help="name of the workers that are scaled together; a label of metrics")
    pod_name: str = option("", help="pod that this process runs in, for `diptych status` and scaling down")
    kv_backend: KvBackend = option("ucx", help="library that moves KV pages; peers need the same", group="transfer")
    transports: Transports = option("auto", help="ways to move KV pages; auto: the fastest", group="transfer")
    kv_path: KvPath = option("auto", help="how pages are brought to peers; auto: the fastest tested", group="transfer")
    kv_require: Requirement = option(
        "any", help="slowest kind of link to use; without one the worker is not ready", group="transfer"
    )
    kv_integrity: Integrity = option(
        "sampled", help="which KV is verified when it arrives: off, sampled (1 in 16), always", group="transfer"
    )
    kv_transfer_timeout_s: float = option(30.0, help="seconds that a request's KV may be on its way", group="transfer")
    kv_layer_windows: int = option(
        4, help="pieces in which KV follows the last step of a prompt, by layers; 1: after the step", group="transfer"
    )
    kv_pull: Literal["on", "off"] = option(
        "on", help="pull cached prefixes from other workers instead of computing them, and lend ours", group="transfer"
    )
    weights_from: WeightsFrom = option(
        "disk",
        help="where weights come from at start; peers: workers of the same model, else the disk, and ours are given",
        group="transfer",
    )
    move_links: int = option(
        MOVE_LINKS,
        help="other decode workers that this one links to, for requests that move; 0: none",
        group="transfer",
    )
    drain_s: float = option(30.0, help="seconds that requests get to finish after SIGTERM; the rest is handed back")
    drain_cache_s: float = option(
        3.0, help="seconds of a drain in which peers may take cached prefixes that they lack; 0: none"
    )
    stall_s: float = option(60.0, help="seconds without an answer after which a scheduler counts as hung")
    tokenizer_threads: int = option(2, help="threads that tokenise what routers send as text", group="prompts")
    tokenizer_cache_bytes: int = option(
        64 << 20, help="memory for the tokens of earlier messages and prompts; 0: none", group="prompts"
    )
    nnodes: int = option(
        1, help="nodes that the processes of --tp and --pp are divided among: each runs this command", group="nodes"
    )
    node_rank: int = option(0, help="number of this node; 0 leads the group, and is what routers know", group="nodes")
    leader: str = option("", help="host:port at which node 0 serves gRPC, as other nodes reach it", group="nodes")
    node_interface: str = option(
        "", help="network device for what nodes tell each other and add up; empty: that of --leader", group="nodes"
    )
    node_wait_s: float = option(600.0, help="seconds in which all nodes of a group must come", group="nodes")
    log_format: LogFormat = option("auto", help="auto, json or text", group="logging")
    log_level: LogLevel = option("info", help="debug, info, warning or error", group="logging")

    def validate(self) -> None:
        EngineOptions.validate(self)
        check_replicas(self.bootstrap)
        if self.stall_s <= 0:
            raise ConfigError(f"--stall-s must be positive, not {self.stall_s}")
        if self.tokenizer_threads < 1:
            raise ConfigError(f"--tokenizer-threads must be positive, not {self.tokenizer_threads}")
        if self.tokenizer_cache_bytes < 0:
            raise ConfigError(f"--tokenizer-cache-bytes must not be negative, as {self.tokenizer_cache_bytes} is")
        if self.drain_s < 0:
            raise ConfigError(f"--drain-s must not be negative, as {self.drain_s} is")
        if self.weights_from == "peers" and self.num_ranks > 1:
            raise ConfigError("--weights-from peers needs --tp 1 and --pp 1: ranks read their parts from disk")
        if self.weights_from == "peers" and self.dp_attention:
            raise ConfigError("--weights-from peers is not for --dp-attention: ranks read their experts from disk")
        if self.weights_from == "peers" and self.device == "sim":
            raise ConfigError("--weights-from peers needs weights: --device sim has none")
        if not self.drain_cache_s >= 0:
            raise ConfigError(f"--drain-cache-s must not be negative, as {self.drain_cache_s} is")
        if self.move_links < 0 or self.move_links % 2:
            raise ConfigError(f"--move-links must be even and not negative, not {self.move_links}")
        if self.kv_backend == "nixl" and self.kv_require != "any":
            raise ConfigError(f"--kv-require {self.kv_require} needs --kv-backend ucx: NIXL does not tell its lanes")
        self.transfer_rules.validate()
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Raises `ConfigError` where no group over nodes could come of it."""
        if self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank is {self.node_rank}: of --nnodes {self.nnodes} they are 0 and up")
        if self.nnodes == 1:
            if self.leader:
                raise ConfigError("--leader is for a group over several nodes: give --nnodes, too")
            return
        host, _, port = self.leader.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"--nnodes {self.nnodes} needs --leader HOST:PORT, where node 0 serves gRPC")
        if self.node_rank == 0 and self.port not in (0, int(port)):
            raise ConfigError(f"--port {self.port} of node 0 is not that of --leader {self.leader}: make them equal")
        self._check_ranks_of_nodes()
        if self.dp > 1:
            raise ConfigError("--nnodes needs --dp 1: start a group of nodes for each scheduler")
        if not self.node_wait_s > 0:
            raise ConfigError(f"--node-wait-s must be positive, not {self.node_wait_s}")
        if is_loopback(self.host) and not is_loopback(host):
            words = f"nobody on another node reaches --host {self.host}, though --leader is {self.leader}"
            raise ConfigError(f"{words}: listen at an address of this node, or at ::")

    def _check_ranks_of_nodes(self) -> None:
        """Raises `ConfigError` where nodes would have unlike numbers of ranks, or stages lie across them."""
        ranks = f"--tp {self.tp}" + (f" times --pp {self.pp}" if self.pp > 1 else "")
        if self.num_ranks % self.nnodes:
            raise ConfigError(f"{ranks} can't be divided among --nnodes {self.nnodes}: all have equally many")
        if cuts_stages(self.tp, share := self.num_ranks // self.nnodes):
            words = f"a node would have {share} ranks, so a stage would lie on two nodes, beside another one"
            raise ConfigError(f"{ranks} can't be divided among --nnodes {self.nnodes}: {words}")

    @property
    def own_port(self) -> int:
        """Where gRPC is served: a leader is where it is said to be."""
        return int(self.leader.rpartition(":")[2]) if self.nnodes > 1 and self.node_rank == 0 else self.port

    @property
    def transfer_rules(self) -> TransferRules:
        pulls = self.kv_pull == "on"
        return TransferRules(self.kv_integrity, self.kv_transfer_timeout_s, self.kv_layer_windows, pulls)

    @property
    def release_s(self) -> float:
        """How long it may take until what was handed back holds no page any more."""
        return self.kv_transfer_timeout_s + RELEASE_MARGIN_S

    @property
    def grace_s(self) -> int:
        """How long the process may take to end."""
        return math.ceil(self.drain_s + self.release_s + EXIT_S)

    @property
    def engine_options(self) -> EngineOptions:
        names = [field.name for field in dataclasses.fields(EngineOptions)]
        return EngineOptions(**{name: getattr(self, name) for name in names})

    @property
    def advertised_host(self) -> str:
        return reachable_host(self.host, self.advertise_host)
