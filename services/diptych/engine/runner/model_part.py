"""What one process loads of a model: all of it, or the part of one tensor-parallel rank, of a pipeline's stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from diptych.architectures.config import ModelConfig
from diptych.architectures.next_layer import placement_of
from diptych.architectures.placement import Placed, with_output
from diptych.architectures.stages import stage_layers
from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.shard import Shard, cut_tensors
from diptych.checkpoints.source import ModelSource
from diptych.engine.lora.rank_part import adapted_placement
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.stages import Stages
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.tensor_parallel.ops import TensorParallelOps


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What the layers compute, where its tensors go, and how."""

    config: ModelConfig
    placement: Iterable[Placed]
    tensors: Iterable[tuple[str, Stored]]
    wrap: Callable[[Ops], Ops]
    adapted: Iterable[Placed]  # as adapters see it, see `adapted_placement`

    @staticmethod
    def of(source: ModelSource, communicator: Communicator | None, *, whole_experts: bool = False) -> ModelPart:
        """Return the part of the communicator's rank; all for None. Raises `ConfigError` if ranks can't share it.

        `whole_experts`: see `Shard`.
        """
        place = placement_of(source.config)
        if communicator is None:
            adapted = with_output(place(source.config))
            return ModelPart(source.config, place(source.config), source.tensors(), lambda ops: ops, adapted)
        shard = _shard(source.config, communicator, whole_experts)
        cuts = shard.placement(source.config, place)
        return ModelPart(
            config=shard.config(source.config),
            placement=[(name, tuple(cut.local for cut in each)) for name, each in cuts if each],
            tensors=cut_tensors(source.tensors(), cuts),
            wrap=lambda ops: (
                TensorParallelOps(ops, communicator) if communicator.size > 1 or communicator.experts else ops
            ),
            adapted=adapted_placement(source.config, shard),
        )


def _shard(config: ModelConfig, communicator: Communicator, whole_experts: bool) -> Shard:
    rank, size, sharing, moe = communicator.rank, communicator.size, communicator.experts, config.moe
    if sharing is None:
        return Shard(rank, size, whole_experts, layers=own_layers(config, communicator.stages))
    if moe is None or not config.has_experts:
        return Shard(rank, size, network=Shard(sharing.rank, sharing.size))
    return Shard(rank, size, whole_experts=True, owned=partial(sharing.own, num_experts=moe.num_experts))


def own_layers(config: ModelConfig, stages: Stages | None) -> range | None:
    """Return the layers of our stage; None: there is one stage."""
    return None if stages is None else stage_layers(config, stages.size)[stages.number]
