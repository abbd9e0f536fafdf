"""Puts the runner of a GPU together. Needs Triton, and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from diptych.engine.models.decoder import Decoder
from diptych.engine.pooling.pooler import Pooler
from diptych.engine.runner.gpu.bus import Bus, CopyEngines
from diptych.engine.runner.gpu.gpu_draft_model import GpuDraftModel
from diptych.engine.runner.gpu.gpu_next_layer import GpuNextLayer
from diptych.engine.runner.gpu.gpu_runner import Follower, GpuRunner, LaunchSampling, Recorded, Sampled
from diptych.engine.runner.gpu.graphs import CudaCapture, Graphs
from diptych.engine.runner.gpu.inputs import StepInputs, StepLimits
from diptych.engine.runner.gpu.ladder import ladder, token_ladder
from diptych.engine.runner.gpu.piece_graphs import PieceGraphs
from diptych.engine.runner.gpu.staging import Staging
from diptych.engine.runner.kv_pool import DTYPES
from diptych.engine.runner.late_rows import LateRows, staged_nbytes
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.runner.sampling.gpu_sampler import GpuSampler, pooled_result
from diptych.engine.values.batch import ForwardBatch, OnLayer, SamplingBatch
from diptych.kernels.gpu.attention.decode_attention import rows_together


def new_runner(
    model: LoadedModel,
    limits: StepLimits,
    device: torch.device,
    *,
    with_graphs: bool,
    layer_listener: Callable[[], OnLayer | None] = lambda: None,
    bus: Bus | None = None,
    on_tower_layer: Callable[[], None] = lambda: None,
) -> GpuRunner:
    """Return what runs `model` on its pool; with graphs of what can be recorded. `bus`: other than the copy engines."""
    new = partial(_runner, limits=limits, device=device, with_graphs=with_graphs, bus=bus)
    with torch.inference_mode():
        sampler = GpuSampler(device, model.config.vocab_size, limits.max_samples, bus)
        sampler.warm_up(DTYPES[model.options.dtype])
        launch = sampler.queue if model.pooler is None else _pooling(model.pooler, bus or CopyEngines())
        return new(model, launch, layer_listener, _new_follower(model.draft, new, limits), on_tower_layer)


def _pooling(pooler: Pooler, bus: Bus) -> LaunchSampling:
    """Return what makes vectors of a step, where no token is chosen."""
    return lambda batch, hidden, sampling: pooled_result(pooler.vectors(hidden, batch), bus)


def _new_follower(draft: LoadedModel | None, new: Callable[..., GpuRunner], limits: StepLimits) -> Follower | None:
    """Return who computes steps behind the model that `draft` guesses for; None: nobody guesses."""
    if draft is None:
        return None
    beside = partial(new, draft, _none_sampled)
    return GpuNextLayer(draft, beside, limits) if draft.config.joins_rows else GpuDraftModel(draft, beside)


def _runner(
    model: LoadedModel,
    launch_sampling: LaunchSampling,
    layer_listener: Callable[[], OnLayer | None],
    draft_model: Follower | None = None,
    on_tower_layer: Callable[[], None] = lambda: None,
    *,
    limits: StepLimits,
    device: torch.device,
    with_graphs: bool,
    bus: Bus | None,
) -> GpuRunner:
    """Return what runs one model. That which guesses computes the same steps, so within the same limits."""
    rungs = ladder(limits.max_samples) if with_graphs and model.attention.is_recordable else ()
    token_rungs = token_ladder(limits.most_graph_tokens) if with_graphs and model.only_queues else ()
    if model.communicator is not None and (experts := model.communicator.experts) is not None:
        rungs, token_rungs = (
            tuple(rung for rung in each if rung <= experts.most_recorded) for each in (rungs, token_rungs)
        )
    capture, new_buffers = CudaCapture(device), cache(lambda num_tokens: model.new_buffers(num_tokens, device))

    def nothing_recorded() -> Recorded:
        return Recorded(Graphs(rungs, capture), PieceGraphs(token_rungs, capture, new_buffers))

    new_staging = partial(Staging, device=device, new_event=torch.cuda.Event, bus=bus)

    def new_inputs() -> StepInputs:
        return StepInputs(limits, new_staging(limits.nbytes), device, _rows_together(model))

    return GpuRunner(
        model,
        new_inputs(),
        launch_sampling,
        torch.zeros(limits.max_samples, dtype=torch.int64, device=device),
        nothing_recorded(),
        nothing_recorded(),
        layer_listener,
        draft_model,
        on_tower_layer,
        _new_late_rows(model, Graphs(rungs, capture, "what came true of rows,"), limits.max_samples, new_staging),
        new_inputs() if model.options.overlap_batches else None,
    )


def _new_late_rows(
    model: LoadedModel, graphs: Graphs, max_rows: int, new_staging: Callable[[int], Staging]
) -> LateRows | None:
    """Return who lets states see what came true; None: the model has none, or its requests have no drafts."""
    states = model.states
    if states is None or states.row_tokens == 1:
        return None
    assert isinstance(model.decoder, Decoder)
    return LateRows(model.decoder, states, new_staging(staged_nbytes(states, max_rows)), graphs)


def _none_sampled(batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> Sampled:
    raise AssertionError("a draft model's tokens are the likeliest ones: nothing is sampled of its logits")


def _rows_together(model: LoadedModel) -> int:
    """Return how many rows of a request attend together in layers of every kind; 0: kernels of latents know of none."""
    if model.config.num_planes == 1:
        return 0
    return min(rows_together(kind.num_heads // kind.num_kv_heads) for kind in model.config.kinds)
