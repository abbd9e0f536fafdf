"""What computes in one process, and the memory of its KV pool: a CPU or GPU by torch, or a simulation without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from diptych.checkpoints.source import ModelSource
from diptych.common.garbage import postponed
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.schedule.step_sizes import Chosen
from diptych.engine.tensor_parallel.group import RankGroup
from diptych.engine.values.batch import GraphUse, OnLayer, OverlapRunner
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import DevicePages, Pool, TransportMemory

if TYPE_CHECKING:  # needs torch, whose threads are configured first
    from diptych.engine.models.lora import Loras


class ModelOnHardware(OverlapRunner, Protocol):
    """A model that can run."""

    @property
    def loras(self) -> Loras: ...

    @property
    def graph_use(self) -> GraphUse: ...


class Hardware(Protocol):
    """What one process computes on. The methods are called in this order."""

    @property
    def options(self) -> EngineOptions:
        """As they were given, with what `auto` means here."""
        ...

    def open(self, model: str) -> ModelSource:
        """Open a model as it is served here. Raises `ConfigError`."""
        ...

    def ranks(self, endpoint: str) -> RankGroup:
        """Meet the other tensor-parallel ranks, as rank 0."""
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

    def pool_bytes(self) -> memoryview:
        """Return the memory of a pool that is the host's."""
        ...


def open_hardware(config: SchedulerConfig) -> Hardware:
    """Return what `--device` means for a process. Raises `ConfigError` where it is missing."""
    if config.engine.device == "sim":
        from diptych.engine.sim.hardware import SimHardware

        return SimHardware(config.engine)
    with postponed():  # torch imports for a second
        from diptych.engine.runner.torch_hardware import TorchHardware

    return TorchHardware(config.engine, config.gpu)
