"""A CPU, or a GPU of the process's own, on which torch or our kernels compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from diptych.architectures.stages import stage_layers
from diptych.checkpoints.shard import Shard
from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError
from diptych.engine.cache.host_pages import HostPages
from diptych.engine.cache.host_tier import PageCopier
from diptych.engine.lora.host import AdapterHost
from diptych.engine.models.adapters.lora import Loras, Prepared
from diptych.engine.models.adapters.lora_host import LoraHost
from diptych.engine.options.config import EngineOptions
from diptych.engine.options.pool_size import head_share, pool_layout
from diptych.engine.options.served_model import as_served
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.memory import buffer_pages
from diptych.engine.runner.kv_pool import DTYPES, kv_bytes, new_kv, shared_kv
from diptych.engine.runner.model_loader import MIB, ModelLoader
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.runner.rebalancing import Rebalancing
from diptych.engine.schedule.pace.step_sizes import Chosen
from diptych.engine.tensor_parallel.communicator import TorchCommunicator
from diptych.engine.tensor_parallel.company import Lead
from diptych.engine.tensor_parallel.group import LeadRank, RankGroup, SingleRank
from diptych.engine.tensor_parallel.meeting import Meeting
from diptych.engine.tensor_parallel.sharing.expert_group import ExpertGroup, LoneCommunicator
from diptych.engine.tensor_parallel.trainer_groups import TorchGroups
from diptych.engine.tensor_parallel.weight_sets import InPlace
from diptych.engine.values.batch import OnLayer
from diptych.engine.values.rounds import Round
from diptych.engine.weights.taking import Taking
from diptych.kernels.gpu import launcher
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import DevicePages, Pool, TransportMemory

logger = logging.getLogger(__name__)


class TorchHardware:
    """Implements `Hardware`."""

    chosen: Chosen
    _loader: ModelLoader
    _kv: Tensor

    def __init__(
        self,
        options: EngineOptions,
        gpu: int,
        taking: Taking | None = None,
        on_tower_layer: Callable[[], None] = lambda: None,
    ) -> None:
        """`taking`: from whom the weights of the first model may come, instead of from disk.

        `on_tower_layer` is called behind each layer of a tower that encodes an image.
        """
        self._on_tower_layer = on_tower_layer
        self._taking = taking
        self._device = open_device(options.device, gpu)
        self.options = options.on("cuda" if self._device.type == "cuda" else "cpu")
        self._communicator: TorchCommunicator | LoneCommunicator | None = None
        self.experts: ExpertGroup | None = None
        self._rebalancing: Rebalancing | None = None

    @property
    def device_name(self) -> str:
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return f"CPU, {self.options.num_threads} thread{'s' if self.options.num_threads > 1 else ''}"

    def open(self, model: str) -> ModelSource:
        return as_served(open_model(model, self.options.load_format), self.options)

    def share_experts(self, place: SharedExperts, rank: int) -> None:
        options = self.options
        counts, redundant = bool(options.rebalance_experts), options.redundant_experts
        dtype = DTYPES[options.dtype]
        kept = {"counts": counts, "opens_memory": options.peer_exchange == "on"}
        kept["overlaps"] = options.overlap_batches > 0
        self.experts = ExpertGroup(place, rank, options.tp, self._device, dtype, redundant, **kept)
        if counts and kept["opens_memory"] and self._device.type == "cuda" and place.rank(rank, options.tp) == 0:
            logger.info("steps are launched kernel by kernel: --rebalance-experts leaves graphs of older layers behind")
        if self._communicator is None:
            self._communicator = LoneCommunicator(self.experts)
        else:
            self._communicator.experts = self.experts

    def begin_round(self, common: Round) -> None:
        assert self.experts is not None, "rounds are of schedulers that share experts"
        if self._rebalancing is not None:
            self._rebalancing.before_round()
        self.experts.begin(common)

    def ranks(self, lead: Lead) -> RankGroup:
        if self.options.num_ranks == 1:
            return SingleRank()
        log = lead.open_log(self.options.num_ranks)
        return LeadRank(log, lambda: self.join(lead.meeting(log), 0))

    def join(self, meeting: Meeting, rank: int) -> TorchCommunicator:
        """Meet the other ranks, as one of them."""
        communicator = TorchCommunicator(rank, self.options.tp, meeting, self._device, self.options.pp)
        communicator.open_peers()
        self._communicator = communicator
        return communicator

    def pool_layout(self, source: ModelSource, rank: int) -> PoolLayout:
        self._loader = ModelLoader(self.options, self._device, self._communicator, self._taking, self._on_tower_layer)
        kv_cache_mib = self._loader.kv_cache_mib(source)
        self.chosen = self._loader.chosen
        options = replace(self.options, kv_cache_mib=kv_cache_mib, max_step_tokens=self.chosen.sizes.max_step_tokens)
        part = ModelPart.of(source, self._communicator, whole_experts=self.options.expert_parallel)
        return pool_layout(part.config, options, head_share(source.config, options, rank), source.config)

    def allocate(self, layout: PoolLayout, memory: TransportMemory | None) -> Pool | DevicePages | None:
        if memory is None:
            self._kv = new_kv(layout, self._device)
            return None
        pool, self._kv = shared_kv(memory, layout, self._device)
        return pool

    def load(self, source: ModelSource, layer_listener: Callable[[], OnLayer | None]) -> ModelRunner | GpuRunner:
        runner = self._loader.load(source, self._kv, layer_listener)
        if self.experts is not None and self.options.rebalance_experts:
            every, redundant = self.options.rebalance_experts, self.options.redundant_experts
            beat = self._on_tower_layer
            self._rebalancing = Rebalancing(runner.model, source, self.experts, every, redundant, beat)
        return runner

    def in_place(self, runner: Any) -> InPlace[Any]:
        return self._loader.in_place(runner)

    def groups(self, rank: int) -> TorchGroups:
        return TorchGroups(rank, self._device)

    def adapters(self, source: ModelSource, rank: int, loras: Callable[[], Loras]) -> AdapterHost[Prepared]:
        tp, pp = self.options.tp, self.options.pp
        layers = stage_layers(source.config, pp)[rank // tp] if pp > 1 else None
        return LoraHost(source.config, Shard(rank % tp, tp, layers=layers), loras)

    def pool_bytes(self) -> memoryview:
        return kv_bytes(self._kv)

    def host_pages(self, layout: PoolLayout, num_slots: int, rank: int) -> PageCopier:
        if self._device.type == "cpu":
            return HostPages(kv_bytes(self._kv), layout.page_nbytes, num_slots)
        from diptych.engine.runner.gpu.new_host_pages import new_host_pages  # needs Triton

        buffered = buffer_pages(self.options.host_cache_mib * MIB, self.chosen.sizes.max_step_tokens, layout)
        return new_host_pages(self._kv, num_slots, buffered, rank)


def open_device(wanted: str, gpu: int) -> torch.device:
    """Return the device that `--device` means for the process that GPU number `gpu` is for, and make it current.

    Raises `ConfigError` where it is missing.
    """
    device = torch.device(choose_device(wanted, gpu, torch.cuda.device_count()))
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise ConfigError("a GPU needs Triton: install diptych[gpu], or use --device cpu")
        torch.cuda.set_device(device)
        _use_our_launcher()
    return device


def _use_our_launcher() -> None:
    import triton  # is not installed everywhere

    launcher.use_it(triton.knobs)


def choose_device(wanted: str, gpu: int, num_gpus: int) -> str:
    """Return "cpu", or "cuda:N" where the machine has GPU N. `auto` never means a CPU beside GPUs."""
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        return "cpu"
    if gpu >= num_gpus:
        raise ConfigError(
            f"--device {wanted} needs GPU {gpu} here, but torch sees {num_gpus}: see --base-gpu, --tp and --dp"
        )
    return f"cuda:{gpu}"
