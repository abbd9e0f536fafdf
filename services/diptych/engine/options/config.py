"""What a frontend tells the scheduler process that it starts: one JSON argument."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.common.logging import LogFormat, LogLevel
from diptych.common.members.roles import Role
from diptych.common.net.served import LoadFormat, check_max_model_len
from diptych.engine.options.device_kind import DeviceKind
from diptych.engine.options.logit_processors import parse_processors
from diptych.engine.options.node_place import NodePlace
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.options.speculation import parse_speculate
from diptych.engine.options.store_url import check_store
from diptych.engine.schedule.pace.step_sizes import GivenSizes
from diptych.engine.tensor_parallel.transfers.rank_id import rank_id
from diptych.engine.values.limits import MAX_DRAFTS, MAX_ROW_DRAFTS, PIN_SHARE, RETRACTED_S, Scheduling
from diptych.engine.values.policy_names import EvictionPolicy, SchedulePolicy
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.request_groups import NO_DRAFTS, OF_HEAD
from diptych.kvtransfer.lanes import KvPath, Requirement, Transports

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend = Literal["auto", "cpu", "torch", "triton", "flashinfer"]
Switch = Literal["on", "off"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"]
Quantization = Literal["auto", "none", "fp8"]
KvBackend = Literal["ucx", "nixl"]
Overlap = Literal["auto", "on", "off"]
KvWindows = Literal["free", "keep"]
USUAL_TIMING: Final = ("h200",)

WeightsFrom = Literal["disk", "peers"]

KV_WINDOWS: Final[KvWindows] = "free"

DTYPE_ON: Final[Mapping[str, Dtype]] = {"cpu": "float32", "cuda": "bfloat16", "sim": "bfloat16"}  # for `auto`
KV_CACHE_MIB_ON: Final[Mapping[str, int]] = {"cpu": 512, "cuda": 0, "sim": 512}  # for 0; a GPU's is measured

_AT_LEAST_ONE: Final = (
    "tp",
    "pp",
    "dp",
    "num_threads",
    "page_size",
    "max_step_tokens",
    "max_requests",
    "max_graph_tokens",
    "max_waiting",
    "max_loaded_loras",
    "max_lora_rank",
)
_CACHES: Final = ("kv_cache_mib", "host_cache_mib", "file_cache_mib", "shared_cache_mib")
_OF_SHARED_EXPERTS: Final = ("redundant_experts", "rebalance_experts", "overlap_batches")
_NOT_NEGATIVE: Final = ("mixed_step_ms", *_CACHES, "max_loras", "base_gpu", *_OF_SHARED_EXPERTS)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs its model. The same names as the command's flags."""

    model: str = option("smollm2", help="'smollm2', 'sim', a .gguf file or a Hugging Face folder", group="engine")
    load_format: LoadFormat = option("auto", help="of the weights; dummy: random ones, no file", group="engine")
    device: DeviceKind = option(
        "auto", help="what computes; auto: a GPU where there is one; sim: nothing, KV and time only", group="engine"
    )
    sim_timing: tuple[str, ...] = option(
        USUAL_TIMING,
        help="of --device sim: h200, none, FILE.json, or microseconds: step=4000,prompt=25.5,request=0,context=0.034",
        group="engine",
    )
    base_gpu: int = option(0, help="GPU of the first process; each further process takes the next", group="engine")
    dtype: Dtype = option(
        "auto",
        help="of activations, and of weights that are not quantised; auto: float32 on CPUs, bfloat16 on GPUs",
        group="engine",
    )
    quantization: Quantization = option(
        "auto",
        help="weights in memory: auto, as the checkpoint stores them; none, in --dtype; fp8, made so on GPUs",
        group="engine",
    )
    deterministic: bool = option(
        False, help="a request's tokens do not depend on what else runs, on GPUs too, which costs time", group="engine"
    )
    kv_cache_dtype: KvCacheDtype = option("auto", help="of keys and values; auto: as --dtype", group="engine")
    tp: int = option(1, help="processes that share one model's weights and KV (tensor parallel)", group="engine")
    pp: int = option(
        1, help="stages of --tp processes that have some of the layers each (pipeline parallel)", group="engine"
    )
    expert_parallel: bool = option(
        False, help="each of --tp processes has some experts whole, instead of a part of each", group="engine"
    )
    dp: int = option(1, help="schedulers side by side, each with all weights (data parallel)", group="engine")
    dp_attention: bool = option(
        False,
        help="schedulers of --dp share one set of experts, or of a dense model its feed-forward networks, and step at"
        " once; attention and KV are each one's own",
        group="engine",
    )
    redundant_experts: int = option(
        0, help="copies of experts beside one of each, in every layer, with --dp-attention", group="engine"
    )
    rebalance_experts: int = option(
        0, help="steps after which --dp-attention deals experts out anew, by their work; 0: never", group="engine"
    )
    peer_exchange: Switch = option(
        "on",
        help="GPUs of --dp-attention that can store to each other's memory exchange tokens so, and record steps",
        group="engine",
    )
    overlap_batches: int = option(
        0,
        help="steps of --dp-attention with so many tokens are computed in halves: one computes while tokens of"
        " the other travel to experts, or to other ranks; 0: none are",
        group="engine",
    )
    num_threads: int = option(1, help="CPU threads for the model, of each process", group="engine")
    kv_cache_mib: int = option(
        0, help="memory for KV pages, MiB, of each process; 0: 512 on CPUs, what is free on GPUs", group="engine"
    )
    gpu_memory_share: float = option(
        0.9, help="of a GPU's memory that a process may take, when --kv-cache-mib is 0", group="engine"
    )
    cuda_graphs: Switch = option("on", help="replay decode steps and small prompts, on GPUs", group="engine")
    max_model_len: int = option(
        0, help="tokens of prompt and output that a request may have; 0: what the model takes", group="engine"
    )
    page_size: int = option(16, help="tokens a KV page", group="engine")
    max_step_tokens: int | None = option(
        None, help="prompt tokens a step, fewer far into a long one; not given: by the device's speed", group="engine"
    )
    max_requests: int | None = option(
        None, help="requests that hold KV at once; not given: by the memory for KV", group="engine"
    )
    max_graph_tokens: int | None = option(
        None, help="largest step with prompts replayed by --cuda-graphs; not given: by the host's speed", group="engine"
    )
    schedule_policy: SchedulePolicy = option("fcfs", help="which waiting request is admitted next", group="scheduling")
    mixed_step_ms: float = option(
        100.0, help="time for steps that compute prompts and output; 0: not bounded", group="scheduling"
    )
    max_waiting: int = option(1024, help="requests that wait; more are sent to another worker", group="scheduling")
    overlap: Overlap = option("auto", help="plan the next step while one runs; auto: not on CPUs", group="scheduling")
    speculate: str = option(
        "off",
        help="guess tokens and verify several at once: suffix, ngram, draft:PATH (a model), mtp, eagle:PATH; off;"
        " no token differs",
        group="scheduling",
    )
    logit_processors: tuple[str, ...] = option(
        (), help="code of yours that requests may name to change logits, as name=module:function", group="scheduling"
    )
    tenant_weights: tuple[str, ...] = option(
        (), help="shares of tenants, as name=weight; a tenant without one has weight 1", group="scheduling"
    )
    eviction_policy: EvictionPolicy = option("lru", help="which cached KV page goes first: lru or lfu", group="engine")
    host_cache_mib: int = option(0, help="host memory for KV pages that the pool evicts, MiB; 0: none", group="engine")
    pin_share: float = option(
        PIN_SHARE,
        help="of the KV pool, for sessions that have called a tool: kept while they are away; 0: none is",
        group="engine",
    )
    file_cache_dir: str = option("", help="folder for KV pages that outlive the process; empty: none", group="engine")
    file_cache_mib: int = option(0, help="files in --file-cache-dir, of each scheduler, MiB", group="engine")
    shared_cache: str = option(
        "",
        help="URL of a store of KV pages that workers share: s3:, gs:, az:, valkey: or file:; empty: none",
        group="engine",
    )
    shared_cache_mib: int = option(0, help="a directory's part of --shared-cache, of all workers, MiB", group="engine")
    kv_windows: KvWindows = option(
        KV_WINDOWS,
        help="KV behind the windows of layers that have some; free: given to others at once; keep: when a request ends",
        group="engine",
    )
    kv_events: Switch = option("on", help="tell routers which prefixes are cached", group="engine")
    lora: tuple[str, ...] = option((), help="adapters to load at start, as name=folder (PEFT)", group="engine")
    max_loras: int = option(8, help="adapters that requests can run with at once; 0: none", group="engine")
    max_loaded_loras: int | None = option(
        None, help="adapters loaded at once, in host memory; not given: as --max-loras", group="engine"
    )
    max_lora_rank: int = option(64, help="the highest rank of an adapter on a GPU", group="engine")
    attention_backend: AttentionBackend = option("auto", help="attention implementation", group="engine")
    prefill_attention_backend: AttentionBackend | None = option(
        None, help="of steps with prompts; not given: as --attention-backend", group="engine"
    )
    decode_attention_backend: AttentionBackend | None = option(
        None, help="of steps that continue requests; not given: as --attention-backend", group="engine"
    )

    def validate(self) -> None:
        for name in _AT_LEAST_ONE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, but is {getattr(self, name)}")
        if not 0 < self.gpu_memory_share <= 1:
            raise ConfigError(f"--gpu-memory-share must be above 0 and at most 1, not {self.gpu_memory_share}")
        if not 0 <= self.pin_share <= 1:
            raise ConfigError(f"--pin-share must be from 0 to 1, not {self.pin_share}")
        check_max_model_len(self.max_model_len)
        self.scheduling()
        self.loras()
        self._check_timing()
        if parse_processors(self.logit_processors) and self.device == "sim":
            raise ConfigError("--device sim computes no logits to change: leave out --logit-processors")
        self._check_draft_model()
        self._check_deterministic()
        self._check_file_cache()
        self._check_shared_cache()
        if self.device == "sim" and self.tp > 1:
            raise ConfigError("--device sim needs --tp 1: ranks are not simulated")
        self._check_dp_attention()
        self._check_pp()
        if self.expert_parallel and self.tp == 1 and not self.dp_attention:
            raise ConfigError("--expert-parallel needs --tp above 1: it is how those processes share experts")

    def _check_dp_attention(self) -> None:
        """Raises `ConfigError` for what schedulers that step at once can't do."""
        if not self.dp_attention:
            for name in _OF_SHARED_EXPERTS:
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} is for --dp-attention: give that, too")
            return
        if self.dp == 1:
            raise ConfigError("--dp-attention needs --dp above 1: the schedulers that share experts, or networks")
        if self.device == "sim":
            raise ConfigError("--device sim computes nothing that schedulers could share: leave out --dp-attention")
        if self.overlap == "on" and self.device == "cpu":
            raise ConfigError("--overlap on is not for --dp-attention on CPUs, where all step at once: leave it out")
        if parse_speculate(self.speculate).has_layers:
            words = "whose layers would have steps of their own: give suffix or ngram"
            raise ConfigError(f"--dp-attention does not take --speculate {self.speculate}, {words}")
        if self.lora:
            raise ConfigError("--dp-attention takes no adapters: leave out --lora, or --dp-attention")
        self._check_overlap_batches()
        if self.deterministic:
            words = "whose sums depend on where experts are: leave it out"
            raise ConfigError(f"--deterministic is not for --dp-attention, {words}")

    def _check_overlap_batches(self) -> None:
        """Raises `ConfigError` where halves of a step can't be on their way at once."""
        if not self.overlap_batches or self.device != "cuda":
            return
        if self.peer_exchange == "on":
            words = "which has room for one step at a time, and is faster: leave it out, or give --peer-exchange off"
            raise ConfigError(f"--overlap-batches is not for GPUs that exchange through each other's memory, {words}")
        if self.tp > 1:
            words = "where sums of ranks and exchanges would be on their way at once: leave out one of them"
            raise ConfigError(f"--overlap-batches is not for --tp {self.tp} on GPUs, {words}")

    def _check_pp(self) -> None:
        """Raises `ConfigError` for what stages of a pipeline can't do."""
        if self.pp == 1:
            return
        if self.device == "sim":
            raise ConfigError("--device sim needs --pp 1: stages are not simulated")
        if self.dp_attention:
            raise ConfigError("--pp is not for --dp-attention, whose schedulers step at once: leave out one of them")
        guessing = parse_speculate(self.speculate)
        if guessing.source == OF_HEAD:
            words = "whose head reads three layers, which are in several stages: give mtp, draft:PATH, suffix or ngram"
            raise ConfigError(f"--pp does not take --speculate {self.speculate}, {words}")
        if guessing.has_layers and self.device == "cuda":
            words = "whose passes between stages have not run on GPUs: give suffix or ngram"
            raise ConfigError(f"--pp does not take --speculate {self.speculate} on GPUs, {words}")

    def _check_timing(self) -> None:
        if self.sim_timing == USUAL_TIMING:  # as of every worker that computes, which needs no model of steps for it
            return
        from diptych.engine.options.sim_timing import read_timing

        read_timing(self.sim_timing)

    def _check_draft_model(self) -> None:
        """Raises `ConfigError` where no draft model can be asked."""
        if not parse_speculate(self.speculate).has_layers:
            return
        if self.device == "sim":
            raise ConfigError("--device sim computes no draft layers: give --speculate suffix or ngram")
        if self.overlap == "on" and self.device == "cpu":
            words = "which waits for tokens that it guesses behind"
            raise ConfigError(f"--overlap on is not for a draft model on CPUs, {words}: leave it out")

    def _check_file_cache(self) -> None:
        if bool(self.file_cache_dir) != bool(self.file_cache_mib):
            given, other = ("dir", "mib") if self.file_cache_dir else ("mib", "dir")
            raise ConfigError(f"--file-cache-{given} needs --file-cache-{other}: which folder, and how much of it")

    def _check_shared_cache(self) -> None:
        if self.shared_cache:
            check_store(self.shared_cache, self.shared_cache_mib)
        elif self.shared_cache_mib:
            raise ConfigError("--shared-cache-mib needs --shared-cache: the URL of a directory")

    def _check_deterministic(self) -> None:
        """Raises `ConfigError` for what adds up in another order when other requests are there."""
        if not self.deterministic:
            return
        if self.tp > 2:
            raise ConfigError("--deterministic needs --tp 1 or 2: sums over more ranks have no order of their own")
        if self.quantization == "fp8":
            raise ConfigError("--deterministic multiplies weights of 16 or 32 bits: leave out --quantization fp8")
        if self.lora:
            raise ConfigError(
                "--deterministic takes no adapters, whose products depend on who else has one: leave out --lora"
            )

    def on(self, device: DeviceKind) -> EngineOptions:
        """Return what `auto` means on a device. Raises `ConfigError` for what it can't do."""
        dtype: Dtype = DTYPE_ON[device] if self.dtype == "auto" else self.dtype
        kv_cache_mib = self.kv_cache_mib or KV_CACHE_MIB_ON[device]
        there = replace(self, device=device, dtype=dtype, kv_cache_mib=kv_cache_mib)
        has_graphs = self.peer_exchange == "on" and not self.rebalance_experts  # for which layers are made anew
        if (self.dp_attention and not has_graphs) or self.pp > 1:  # sizes differ each time; stages send in between
            there = replace(there, cuda_graphs="off")
        there._check_draft_model()
        there._check_pp()
        there._check_dp_attention()
        return there

    @property
    def given_sizes(self) -> GivenSizes:
        return GivenSizes(self.max_step_tokens, self.max_requests, self.max_graph_tokens)

    @property
    def num_ranks(self) -> int:
        """The processes of one scheduler: rank r has the stage r // `tp`, and of its heads the part r % `tp`."""
        return self.tp * self.pp

    def of_group(self, group: int) -> EngineOptions:
        """Return the options of one of the `dp` schedulers: each has GPUs of its own."""
        return replace(self, base_gpu=self.base_gpu + group * self.num_ranks)

    @property
    def kv_dtype(self) -> str:
        """What the KV pool holds. Not before `on`."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def extend_backend(self) -> str:
        """The attention backend of steps with prompts."""
        return self.prefill_attention_backend or self.attention_backend

    @property
    def decode_backend(self) -> str:
        """The attention backend of all other steps."""
        return self.decode_attention_backend or self.attention_backend

    def scheduling(self) -> Scheduling:
        """Return the scheduling options as the cores take them. Raises `ConfigError`."""
        weights = dict(map(_tenant_weight, self.tenant_weights))
        return Scheduling(policy=self.schedule_policy, max_waiting=self.max_waiting, tenant_weights=weights)

    @property
    def mixed_step_s(self) -> float:
        """What a step may take that requests wait for and that also computes prompts."""
        return self.mixed_step_ms / 1000 or math.inf

    @property
    def max_drafts(self) -> int:
        """How many a step verifies at most, of all its requests."""
        return 0 if self.speculate == NO_DRAFTS else MAX_DRAFTS

    @property
    def row_tokens(self) -> int:
        """How many tokens a step computes at most of a request that continues, its newest one among them."""
        return 1 if self.speculate == NO_DRAFTS else 1 + MAX_ROW_DRAFTS

    @property
    def num_lora_slots(self) -> int:
        takes_none = self.device == "sim" or self.deterministic or self.dp_attention
        return 0 if takes_none else self.max_loras

    @property
    def num_loaded_loras(self) -> int:
        return max(self.num_lora_slots, self.max_loaded_loras or 0) if self.num_lora_slots else 0

    def loras(self) -> list[tuple[str, Path]]:
        """Return names and folders of the adapters to load at start. Raises `ConfigError`."""
        if self.lora and self.device == "sim":
            raise ConfigError("--lora needs a model that computes: --device sim takes no adapters")
        if self.lora and not self.max_loras:
            raise ConfigError("--lora needs --max-loras above 0")
        if self.max_loaded_loras is not None and self.max_loaded_loras < self.max_loras:
            words = f"--max-loaded-loras {self.max_loaded_loras} is less than --max-loras {self.max_loras}"
            raise ConfigError(f"{words}, the slots for those that are computed at once: lower that, too")
        if len(self.lora) > max(self.max_loras, self.max_loaded_loras or 0):
            words = f"more than --max-loras {self.max_loras}: give --max-loaded-loras"
            raise ConfigError(f"--lora names {len(self.lora)} adapters, {words}")
        return [_lora(text) for text in self.lora]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything a scheduler process needs."""

    component: str  # in log lines
    log_format: LogFormat
    log_level: LogLevel
    instance_id: int
    transports: Transports  # for workers with peers
    transfer: TransferRules  # for workers with peers
    engine: EngineOptions
    role: str = Role.UNIFIED.value  # served at start
    host: str = "localhost"  # at which its peers reach it: see `transfer_where`
    kv_backend: KvBackend = "ucx"
    retracted_s: float = RETRACTED_S  # see `Limits`
    rank: int = 0  # of this process among `engine.num_ranks`; 0 schedules, the others follow
    kv_path: KvPath = "auto"
    kv_require: Requirement = "any"
    weights_from: WeightsFrom = "disk"  # peers: the first command names them
    place: NodePlace | None = None  # in a group over several nodes
    sharing: SharedExperts | None = None  # with `dp_attention`: among the schedulers that share experts
    # set by `start_scheduler`:
    endpoint: str = ""  # ZMQ ipc address that the frontend has bound
    parent_pid: int = 0  # the scheduler ends with this process
    heartbeat_fd: int = -1  # inherited, of rank 0: where its loop says that it comes round

    @property
    def name(self) -> str:
        """The name of this process in log lines."""
        return f"{self.component} rank {self.rank}" if self.rank else self.component

    @property
    def gpu(self) -> int:
        """The GPU of this process, where one computes: each node has some of its own."""
        return self.engine.base_gpu + self.rank - self.ranks_here[0]

    @property
    def ranks_here(self) -> range:
        """The ranks that run on this node."""
        num_ranks = self.engine.num_ranks
        return range(num_ranks) if self.place is None else self.place.ranks(num_ranks)

    @property
    def transfer_id(self) -> int:
        """What this rank's transfer engine is known by."""
        return rank_id(self.instance_id, self.rank)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SchedulerConfig:
        fields = json.loads(text)
        fields["engine"] = EngineOptions(**fields["engine"])
        fields["transfer"] = TransferRules(**fields["transfer"])
        if fields["place"] is not None:
            fields["place"] = NodePlace(**fields["place"])
        if fields["sharing"] is not None:
            fields["sharing"] = SharedExperts(**fields["sharing"])
        return cls(**fields)


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
