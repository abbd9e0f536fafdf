"""What everything in a scheduler process stands on: the model's files, the other ranks, KV memory, the way to peers.

`Hardware` is what computes in one process, and the memory of its KV pool: a CPU or GPU by torch, or a simulation
without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from diptych.architectures.fair_shares import check_divides
from diptych.architectures.stages import check_stages
from diptych.common.garbage import garbage_postponed
from diptych.common.members.heartbeat import SharedHeartbeat
from diptych.common.members.roles import Role
from diptych.engine.cache.cache_changes import NO_CHANGES, CacheChanges
from diptych.engine.cache.host_tier import NO_COPIER, HostTier, PageCopier
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.options.logit_processors import load_processors
from diptych.engine.options.pool_size import num_host_slots
from diptych.engine.scheduler.lasting import NO_LASTING_TIERS, LastingTiers
from diptych.engine.scheduler.links.links import Links, directions_of, links_of_nobody
from diptych.engine.scheduler.links.tester import LinkTester
from diptych.engine.scheduler.stepping import StepGivenUp, StepWatch
from diptych.engine.tensor_parallel.ended_steps import FollowedRunner
from diptych.engine.values.batch import GraphUse, ImageCounts, OnLayer, WaitForEnd
from diptych.engine.values.kv_regions import pages_per_state, window_pages
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.prompt_cost import prompt_cost
from diptych.engine.values.step_rows import row_limit, row_width
from diptych.engine.values.transfer_rules import layer_windows
from diptych.engine.values.watched_layers import told_states, watched_layers
from diptych.kvtransfer.lanes import PathRule
from diptych.kvtransfer.layout import PoolLayout, layout_to_wire
from diptych.kvtransfer.transport import DevicePages, Pool, ProbePages, Transport, TransportMemory
from diptych.v1 import bootstrap_pb2

if TYPE_CHECKING:  # what hardware brings along; some needs torch, whose threads are configured first
    from diptych.architectures.config import ModelConfig
    from diptych.checkpoints.source import ModelSource
    from diptych.engine.cache.tier import Tier
    from diptych.engine.lora.host import AdapterHost
    from diptych.engine.models.adapters.lora import Loras
    from diptych.engine.options.shared_experts import SharedExperts
    from diptych.engine.schedule.pace.step_sizes import Chosen
    from diptych.engine.tensor_parallel.company import Lead
    from diptych.engine.tensor_parallel.group import RankGroup
    from diptych.engine.tensor_parallel.trainer_groups import TrainerGroups
    from diptych.engine.tensor_parallel.weight_sets import InPlace
    from diptych.engine.values.rounds import Round
    from diptych.engine.weights.memory import WeightMemory
    from diptych.engine.weights.taking import Taking

OpenTransport = Callable[[SchedulerConfig], Transport | None]  # None: nobody is to write into this pool


class ModelOnHardware(FollowedRunner, Protocol):
    """A model that can run."""

    def new_end(self) -> WaitForEnd:
        """Return what waits for the steps so far."""
        ...

    def serve_others(self) -> None:
        """Take part in a step of schedulers that share our experts, without a token."""
        ...

    @property
    def loras(self) -> Loras: ...

    @property
    def graph_use(self) -> GraphUse: ...

    @property
    def image_counts(self) -> ImageCounts: ...

    def memory(self) -> WeightMemory | None:
        """Return where its weights lie; None: it has none."""
        ...


class Hardware(Protocol):
    """What one process computes on. The methods are called in this order."""

    @property
    def options(self) -> EngineOptions:
        """As they were given, with what `auto` means here."""
        ...

    @property
    def device_name(self) -> str:
        """What computes, in words that are the same wherever it is as fast."""
        ...

    def open(self, model: str) -> ModelSource:
        """Open a model as it is served here. Raises `ConfigError`."""
        ...

    def ranks(self, lead: Lead) -> RankGroup:
        """Meet the other tensor-parallel ranks, as rank 0, which `lead` leads to."""
        ...

    def share_experts(self, place: SharedExperts, rank: int) -> None:
        """Meet all ranks of the schedulers that share experts, after those of this one. Raises `ConfigError`."""
        ...

    def begin_round(self, common: Round) -> None:
        """Hear how large the next step is for each scheduler that shares experts."""
        ...

    def pool_layout(self, source: ModelSource, rank: int) -> PoolLayout:
        """Return how the KV pool is laid out. What a GPU has left is only known once the model is on it."""
        ...

    @property
    def chosen(self) -> Chosen:
        """How large steps can be: as given, or as fits what was found when the pool was laid out."""
        ...

    def allocate(self, layout: PoolLayout, memory: TransportMemory | None) -> Pool | DevicePages | None:
        """Allocate the pool, and return it if peers may write into it: those of a transport, in `memory`."""
        ...

    def load(self, source: ModelSource, layer_listener: Callable[[], OnLayer | None]) -> ModelOnHardware:
        """Return a model that runs on the pool. The first is the one that the pool was laid out for. In any thread."""
        ...

    def in_place(self, runner: ModelOnHardware) -> InPlace[ModelOnHardware]:
        """Return what gives the model that runs other weights, in a thread. No step may run until it is done."""
        ...

    def groups(self, rank: int) -> TrainerGroups:
        """Return the groups with trainers, none yet."""
        ...

    def adapters(self, source: ModelSource, rank: int, loras: Callable[[], Loras]) -> AdapterHost[Any]:
        """Return what reads adapters here and puts them into the slots of the model that is served."""
        ...

    def pool_bytes(self) -> memoryview:
        """Return the pool, which lies in host memory: not on GPUs."""
        ...

    def host_pages(self, layout: PoolLayout, num_slots: int, rank: int) -> PageCopier:
        """Allocate host memory for so many pages; return what copies them from the pool and back."""
        ...


@dataclass(frozen=True, slots=True)
class SchedulerBase:
    """What the scheduler of one process is built from. `build_base` makes it."""

    config: SchedulerConfig
    source: ModelSource
    ranks: RankGroup
    layout: PoolLayout
    hardware: Hardware
    copier: PageCopier  # of all ranks, between the pool and host memory
    lasting: LastingTiers  # below both
    chosen: Chosen  # how large steps can be
    links: Links
    transfer: bootstrap_pb2.TransferInfo | None  # how peers reach the KV pool, if there may be some
    watch: StepWatch  # over the steps of the models that it loads

    def limits(self) -> Limits:
        model, options = self.source.config, self.config.engine
        return Limits(
            context_len=model.context_len,
            vocab_size=model.vocab_size,
            eos_ids=frozenset(token_id for token_id in model.eos_ids if token_id < model.vocab_size),
            max_step_tokens=self.chosen.sizes.max_step_tokens,
            max_requests=self.chosen.sizes.max_requests,
            scheduling=options.scheduling(),
            prompt_cost=prompt_cost(model),
            retracted_s=self.config.retracted_s,
            pooling=model.pooling,
            vision=model.vision,
            row_width=row_width(model),
            row_limit=row_limit(model, options.dtype),
            image_row_nbytes=_image_row_nbytes(model, options),
            image_row_dtype=options.dtype,
            watched=watched_layers(model, options.device, options.num_ranks),
            states=told_states(model, options.device, options.num_ranks),
            processors=load_processors(options.logit_processors),
            mixed_step_s=options.mixed_step_s,
        )

    def new_cache(self, limits: Limits) -> KvCache:
        options = self.config.engine
        return KvCache(
            num_pages=self.layout.num_pages,
            page_size=self.layout.page_size,
            max_requests=limits.max_requests + PROMPT_ROWS,
            max_tokens_per_request=limits.context_len,
            eviction_policy=options.eviction_policy,
            tiers=self._tiers(num_host_slots(self.layout, options, self.source.config)),
            changes=CacheChanges() if options.kv_events == "on" else NO_CHANGES,
            pages_per_state=pages_per_state(self.source.config, options.tp, options.dtype, self.layout),
            windows=window_pages(self.source.config, limits.max_step_tokens),
            pin_share=options.pin_share,
            store=self.lasting.shared,
        )

    def load(self, source: ModelSource) -> ModelOnHardware:
        """Return a model that runs on the KV pool. The first is that of `source`."""
        return self.hardware.load(source, self._layer_listener)

    def _layer_listener(self) -> OnLayer | None:
        """A step that other ranks run too runs to its end, and so does one that a GPU has been given."""
        follow = self.links.posting.layer_listener()
        engine = self.config.engine
        can_stop = engine.num_ranks == 1 and engine.device != "cuda" and not engine.dp_attention
        look = self.watch.listener() if can_stop else None
        if follow is None or look is None:
            return follow or look

        def listen(layer: int) -> None:
            follow(layer)
            try:
                look(layer)
            except StepGivenUp:
                self.links.posting.give_up_step()
                raise

        return listen

    def close(self) -> None:
        self.lasting.close()
        self.copier.close()
        self.links.close()
        self.ranks.close()

    def _tiers(self, num_host_slots: int) -> tuple[Tier, ...]:
        """Return the tiers of the prefix cache, in the order in which evicted pages go down."""
        host = (HostTier(num_host_slots, self.copier, time.monotonic),) if num_host_slots else ()
        return host if self.lasting.files is None else (*host, self.lasting.files)


def build_base(
    config: SchedulerConfig, open_transport: OpenTransport, lead: Lead, taking: Taking | None = None
) -> SchedulerBase:
    """Open the model, wait for the other ranks, and allocate. `taking`: from whom its weights may come.

    A GPU's model is loaded before its pool is allocated. Pages are sent whole where layers with a window have their
    own: places in them are no layers that follow each other. So they are from stages of a pipeline, each of which sends
    its part when it has computed it.
    """
    hardware = open_hardware(config, taking)
    options = hardware.options
    source = hardware.open(options.model)
    check_divides(source.config, options.tp)
    check_stages(source.config, options.pp)
    ranks = hardware.ranks(lead)
    if config.sharing is not None:
        hardware.share_experts(config.sharing, config.rank)
    layout, chosen = hardware.pool_layout(source, config.rank), hardware.chosen
    is_one_run = len(source.config.page_groups) == 1 and options.pp == 1
    num_windows = config.transfer.num_windows if is_one_run else 1
    windows = layer_windows(layout.num_layers, num_windows, layout.page_nbytes)
    config = replace(config, engine=options, transfer=replace(config.transfer, num_windows=len(windows)))
    transport = open_transport(config)
    pool = hardware.allocate(layout, transport)
    links, transfer = _share(config, ranks, transport, pool) if transport and pool else (links_of_nobody(), None)
    own_copier = open_host_pages(hardware, layout, config.rank, source.config)
    copier = ranks.lead_copier(own_copier)
    lasting = _lasting_tiers(source, layout, hardware, own_copier, ranks)
    return SchedulerBase(config, source, ranks, layout, hardware, copier, lasting, chosen, links, transfer, StepWatch())


def _lasting_tiers(
    source: ModelSource, layout: PoolLayout, hardware: Hardware, copier: PageCopier, ranks: RankGroup
) -> LastingTiers:
    """Return those that the options name. Raises `ConfigError`."""
    if not (hardware.options.file_cache_dir or hardware.options.shared_cache):
        return NO_LASTING_TIERS
    from diptych.engine.scheduler.lasting_opened import open_lasting_tiers

    return open_lasting_tiers(source, layout, hardware, copier, ranks)


def _image_row_nbytes(model: ModelConfig, options: EngineOptions) -> int:
    """Return what a tower makes of a place of a prompt. Several ranks have parts of pages each: no rows go there."""
    if model.tower is None or options.num_ranks > 1:
        return 0
    return model.tower.row_nbytes(4 if options.dtype == "float32" else 2)


def open_host_pages(hardware: Hardware, layout: PoolLayout, rank: int, model: ModelConfig) -> PageCopier:
    """Return what copies a rank's pages of the whole `model` to host memory and back. Raises `ConfigError`."""
    num_slots = num_host_slots(layout, hardware.options, model)
    return hardware.host_pages(layout, num_slots, rank) if num_slots else NO_COPIER


def _share(
    config: SchedulerConfig, ranks: RankGroup, transport: Transport, pool: ProbePages
) -> tuple[Links, bootstrap_pb2.TransferInfo]:
    """Let peers write into the pool."""
    layout = pool.layout
    metadata = ranks.metadata(transport.metadata())
    info = bootstrap_pb2.TransferInfo(engine_metadata=metadata, layout=layout_to_wire(layout))
    peers = ranks.lead_transport(transport, layout)
    rule = PathRule(config.kv_path, config.kv_require)
    pulls = config.transfer.pulls
    tester = LinkTester(peers, ranks.lead_pool(pool), directions_of(Role(config.role), pulls=pulls), rule)
    windows = layer_windows(layout.num_layers, config.transfer.num_windows, layout.page_nbytes)
    return Links(peers, transport, tester, windows, pulls=pulls), info


def open_hardware(config: SchedulerConfig, taking: Taking | None = None) -> Hardware:
    """Return what `--device` means for a process. Raises `ConfigError` where it is missing."""
    if config.engine.device == "sim":
        from diptych.engine.sim.hardware import SimHardware

        return SimHardware(config.engine)
    with garbage_postponed():  # torch imports for a second
        from diptych.engine.runner.torch_hardware import TorchHardware

    beat = SharedHeartbeat(config.heartbeat_fd).beat
    return TorchHardware(config.engine, config.gpu, taking, on_tower_layer=lambda: beat(time.monotonic()))
