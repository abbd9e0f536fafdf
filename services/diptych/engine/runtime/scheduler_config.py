"""What a frontend tells the scheduler process that it starts: one JSON argument."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogFormat, LogLevel
from diptych.engine.eviction import EvictionPolicy
from diptych.engine.limits import Scheduling
from diptych.engine.loader.load_format import LoadFormat
from diptych.engine.tensor_parallel.rank_id import rank_id
from diptych.engine.transfer_rules import TransferRules
from diptych.kvtransfer.lanes import Requirement
from diptych.kvtransfer.probe.choice import KvPath

Dtype = Literal["float32", "bfloat16"]
AttentionBackend = Literal["auto", "cpu", "torch"]
Switch = Literal["on", "off"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "fp8_e4m3"]
Quantization = Literal["auto", "none"]
Transports = Literal["auto", "shm", "tcp"]
KvBackend = Literal["ucx", "nixl"]
Overlap = Literal["auto", "on", "off"]
ScheduleMode = Literal["prefill-first", "mixed"]
SchedulePolicy = Literal["fcfs", "lpm", "priority", "deadline"]


_AT_LEAST_ONE: Final = (
    "tp",
    "dp",
    "num_threads",
    "kv_cache_mib",
    "page_size",
    "max_step_tokens",
    "max_requests",
    "max_waiting",
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs its model. The same names as the command's flags."""

    model: str = option("smollm2", help="model: 'smollm2', a .gguf file or a Hugging Face folder", group="engine")
    load_format: LoadFormat = option("auto", help="of the weights; dummy: random ones, no file", group="engine")
    dtype: Dtype = option("float32", help="of activations, and of weights that are not quantised", group="engine")
    quantization: Quantization = option(
        "auto", help="weights in memory: auto, as the checkpoint stores them; none, in --dtype", group="engine"
    )
    kv_cache_dtype: KvCacheDtype = option("auto", help="of keys and values; auto: as --dtype", group="engine")
    tp: int = option(1, help="processes that share one model's weights and KV (tensor parallel)", group="engine")
    dp: int = option(1, help="schedulers side by side, each with all weights (data parallel)", group="engine")
    num_threads: int = option(1, help="CPU threads for the model, of each process", group="engine")
    kv_cache_mib: int = option(512, help="memory for KV pages, MiB, of each process", group="engine")
    page_size: int = option(16, help="tokens a KV page", group="engine")
    max_step_tokens: int = option(512, help="prompt tokens a step; longer prompts are chunked", group="engine")
    max_requests: int = option(64, help="requests that hold KV at once", group="engine")
    schedule_policy: SchedulePolicy = option("fcfs", help="which waiting request is admitted next", group="scheduling")
    schedule_mode: ScheduleMode = option(
        "prefill-first", help="whether prompts get steps of their own or share them with output", group="scheduling"
    )
    max_waiting: int = option(1024, help="requests that wait; more are sent to another worker", group="scheduling")
    overlap: Overlap = option("auto", help="plan the next step while one runs; auto: not on CPUs", group="scheduling")
    tenant_weights: tuple[str, ...] = option(
        (), help="shares of tenants, as name=weight; a tenant without one has weight 1", group="scheduling"
    )
    eviction_policy: EvictionPolicy = option("lru", help="which cached KV page goes first: lru or lfu", group="engine")
    host_cache_mib: int = option(0, help="host memory for KV pages that the pool evicts, MiB; 0: none", group="engine")
    kv_events: Switch = option("on", help="tell routers which prefixes are cached", group="engine")
    lora: tuple[str, ...] = option((), help="adapters to load at start, as name=folder (PEFT)", group="engine")
    max_loras: int = option(8, help="adapters loaded at once; 0: none", group="engine")
    attention_backend: AttentionBackend = option("auto", help="attention implementation", group="engine")

    def validate(self) -> None:
        for name in (
            "tp",
            "dp",
            "num_threads",
            "kv_cache_mib",
            "page_size",
            "max_step_tokens",
            "max_requests",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.host_cache_mib < 0:
            raise ConfigError(f"--host-cache-mib must not be negative, but is {self.host_cache_mib}")
        if self.max_loras < 0:
            raise ConfigError(f"--max-loras must not be negative, but is {self.max_loras}")
        self.scheduling()
        self.loras()

    @property
    def kv_dtype(self) -> str:
        """What the KV pool holds."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def scheduling(self) -> Scheduling:
        """Return the scheduling options as the cores take them. Raises `ConfigError`."""
        weights = dict(map(_tenant_weight, self.tenant_weights))
        return Scheduling(
            policy=self.schedule_policy,
            mode=self.schedule_mode,
            max_waiting=self.max_waiting,
            tenant_weights=weights,
        )

    @property
    def num_lora_slots(self) -> int:
        return self.max_loras if self.tp == 1 else 0

    def loras(self) -> list[tuple[str, Path]]:
        """Return names and folders of the adapters to load at start. Raises `ConfigError`."""
        if self.lora and self.tp > 1:
            raise ConfigError("--lora needs --tp 1: adapters are not split over tensor-parallel processes yet")
        if len(self.lora) > self.max_loras:
            raise ConfigError(f"--lora names {len(self.lora)} adapters, more than --max-loras {self.max_loras}")
        return [_lora(text) for text in self.lora]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything a scheduler process needs."""

    component: str  # in log lines
    log_format: LogFormat
    log_level: LogLevel
    endpoint: str  # ZMQ ipc address that the frontend has bound
    parent_pid: int  # the scheduler ends with this process
    instance_id: int
    transports: Transports  # for workers with peers
    transfer: TransferRules  # for workers with peers
    engine: EngineOptions
    kv_backend: KvBackend = "ucx"
    rank: int = 0  # of this process among `engine.tp`; 0 schedules, the others follow
    kv_path: KvPath = "auto"
    kv_require: Requirement = "any"

    @property
    def name(self) -> str:
        """Of this process, in log lines."""
        return f"{self.component} rank {self.rank}" if self.rank else self.component

    @property
    def transfer_id(self) -> int:
        """What this rank's transfer engine is known by."""
        return rank_id(self.instance_id, self.rank)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SchedulerConfig:
        fields = json.loads(text)
        parts = {"engine": EngineOptions(**fields["engine"]), "transfer": TransferRules(**fields["transfer"])}
        return cls(**{**fields, **parts})


def _lora(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(f"--lora takes name=folder, not {text!r}")
    return name, Path(folder).expanduser()


def _tenant_weight(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not name or not 0 < weight < math.inf:
        raise ConfigError(f"--tenant-weights takes name=weight with a weight above 0, not {text!r}")
    return name, weight
