"""The runner of GPUs on a CPU: what stands for the device computes by torch, and a replay does the same work again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from diptych.engine.attention.backend import GraphAttention, PhasedAttention
from diptych.engine.attention.kinds import KindsAttention, KindsGraphAttention
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.models.decoder import Decoder
from diptych.engine.models.layers.buffers import Buffers
from diptych.engine.runner.gpu.gpu_runner import GpuRunner, Recorded
from diptych.engine.runner.gpu.graphs import Captured, Graphs
from diptych.engine.runner.gpu.inputs import StepInputs, StepLimits
from diptych.engine.runner.gpu.piece_graphs import PieceGraphs
from diptych.engine.runner.gpu.staging import Staging
from diptych.engine.runner.gpu.step_ends import StepEnds
from diptych.engine.runner.late_rows import LateRows, staged_nbytes
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.runner.sampling.sampler import sample_step
from diptych.engine.values.batch import ForwardBatch, OnLayer, SamplingBatch, StepResult, WaitForResult

CPU = torch.device("cpu")
NO_ID = 1 << 40  # no table has such a row
T = TypeVar("T")


class TensorAttention(TorchAttention):
    """Reads the step from its tensors when it attends, as a recorded kernel does."""

    def capture_metadata(self, batch: StagedBatch) -> None:
        self._recorded = batch

    def replay_metadata(self, batch: StagedBatch) -> None:
        assert batch.page_table.data_ptr() == self._recorded.page_table.data_ptr()

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        recorded = self._recorded
        used = recorded.seq_lens > 0
        assert (recorded.out_slots[~used] == -1).all(), "padding rows write nowhere"
        if not (count := int(used.sum())):
            out.fill_(torch.nan)
            return
        assert used[:count].all(), "padding comes last"
        now = replace(
            recorded,
            positions=recorded.positions[:count],
            out_slots=recorded.out_slots[:count],
            page_table=recorded.page_table[:count],
            seq_lens=recorded.seq_lens[:count],
        )
        super().init_forward_metadata(now)
        super().forward_decode(qkv[:count], layer, out[:count])
        out[count:] = torch.nan


class ReplayedAttention(PhasedAttention):
    """What attends in a replay was fixed when it was captured, whatever was computed meanwhile."""

    def replay_metadata(self, batch: StagedBatch) -> None:
        super().replay_metadata(batch)
        assert self._graphs is not None
        self._forward = self._graphs.forward_decode


def recordable(model: LoadedModel, kv: Tensor) -> GraphAttention:
    """Return what records the model's attention; of several kinds of layers, each beside the one in torch."""
    kinds = model.attention._extend
    if not isinstance(kinds, KindsAttention):
        return TensorAttention(model.config.attending, kv, torch.float32)
    made = {each: TensorAttention(each._config, each._kv, torch.float32, each._sinks) for each in kinds.backends}
    places = [(made[each], place) for each, place in kinds.places]
    return KindsGraphAttention(list(made.values()), places, kinds.groups)


class Recorder:
    """Records work by keeping it. What a device would compute when it is replayed is nowhere before."""

    def __init__(self, nbytes: int = 0) -> None:
        """`nbytes`: that each recording takes."""
        self.captured = 0
        self._nbytes = nbytes

    def capture(self, work: Callable[[], T]) -> Captured[T]:
        self.captured += 1
        output = work()
        if isinstance(output, Tensor):
            output.fill_(torch.nan if output.is_floating_point() else NO_ID)

        def replay() -> None:
            with torch.inference_mode():
                again = work()
                if isinstance(output, Tensor) and isinstance(again, Tensor):
                    output.copy_(again)

        return Captured(replay, output)

    def used_nbytes(self) -> int:
        return self._nbytes * self.captured


class Mark:
    """A mark of a device that has always come so far."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@dataclass
class Tokens:
    """What was sampled."""

    result: StepResult

    @property
    def token_ids(self) -> Tensor:
        return torch.from_numpy(self.result.token_ids)

    def start_copy(self, ends: StepEnds) -> WaitForResult:
        return lambda: self.result


def emulated_runner(
    model: LoadedModel,
    kv: Tensor,
    limits: StepLimits,
    *,
    rungs: Sequence[int] = (),
    token_rungs: Sequence[int] = (),
    recorder: Recorder | None = None,
    layer_listener: Callable[[], OnLayer | None] = lambda: None,
    rows_together: int = 0,
) -> GpuRunner:
    """Return what runs `model`, which was loaded onto `kv`, with graphs of these sizes."""
    phased = model.attention
    if rungs:
        attention = recordable(model, kv)
        phased = ReplayedAttention(model.attention._extend, model.attention._extend, attention)
    recorder = recorder or Recorder()

    def launch_sampling(batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> Tokens:
        return Tokens(sample_step(model.sampler, logits, sampling, batch.prompt_rows))

    def new_buffers(num_tokens: int) -> Buffers:
        return model.new_buffers(num_tokens, CPU)

    def nothing_recorded() -> Recorded:
        return Recorded(Graphs(rungs, recorder), PieceGraphs(token_rungs, recorder, new_buffers))

    def new_inputs() -> StepInputs:
        return StepInputs(limits, Staging(limits.nbytes, CPU, Mark), CPU, rows_together)

    return GpuRunner(
        replace(model, attention=phased),
        new_inputs(),
        launch_sampling,
        torch.zeros(limits.max_samples, dtype=torch.int64),
        nothing_recorded(),
        nothing_recorded(),
        layer_listener,
        late_rows=_late_rows(model, Graphs(rungs, recorder), limits.max_samples),
        late_inputs=new_inputs() if model.options.overlap_batches else None,
    )


def _late_rows(model: LoadedModel, graphs: Graphs, max_rows: int) -> LateRows | None:
    if model.states is None or model.states.row_tokens == 1:
        return None
    nbytes = staged_nbytes(model.states, max_rows)
    return LateRows(cast(Decoder, model.decoder), model.states, Staging(nbytes, CPU, Mark), graphs)
