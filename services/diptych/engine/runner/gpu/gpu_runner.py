"""Runs a batch on a GPU: the engine's `OverlapRunner` there.

Rule: nothing here waits for the device but what `sample` returns. A step's inputs are staged, its kernels queued, or
replayed from graphs, and its tokens copied back, all on one stream; the next step may be queued behind it before its
tokens are known to the host, since placeholders are filled in from the tokens where they were sampled.

With tensor-parallel ranks, rank 0 samples. The others get its tokens before a step that has placeholders; that it has
some, every rank sees in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.staged_batch import StagedBatch, logits_rows, single_rows
from diptych.engine.models.adapters.lora import Loras
from diptych.engine.models.pieces import Pieces, at_once
from diptych.engine.runner.gpu.copy_queues import StreamMark
from diptych.engine.runner.gpu.graphs import Graphs
from diptych.engine.runner.gpu.inputs import StepInputs
from diptych.engine.runner.gpu.ladder import (
    NO_SLOT,
    common_rung_of,
    common_token_rung_of,
    has_rows,
    rung_of,
    token_rung_of,
)
from diptych.engine.runner.gpu.piece_graphs import PieceGraphs
from diptych.engine.runner.gpu.step_ends import StepEnds
from diptych.engine.runner.late_rows import LateRows
from diptych.engine.runner.loaded_model import LoadedModel
from diptych.engine.runner.micro_batches import NOBODYS, Parts, halves_of_round
from diptych.engine.values.batch import (
    DraftModel,
    ForwardBatch,
    GraphUse,
    ImageCounts,
    OnLayer,
    SamplingBatch,
    StepResult,
    WaitForEnd,
    WaitForResult,
)
from diptych.engine.weights.memory import WeightMemory


class Recorded(NamedTuple):
    """Steps as graphs."""

    graphs: Graphs  # of decode steps
    pieces: PieceGraphs  # of small steps with prompts


class Sampled(Protocol):
    """Tokens on the device, and what was asked of them."""

    @property
    def token_ids(self) -> Tensor:
        """int64 `[num_samples]`."""
        ...

    def start_copy(self, ends: StepEnds) -> WaitForResult: ...


class LaunchSampling(Protocol):
    """Queues the choice of a step's tokens."""

    def __call__(self, batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> Sampled: ...


class Follower(DraftModel, Protocol):
    """A draft model, which computes all tokens that its model does."""

    def follow(self, batch: ForwardBatch, newest: Tensor, on_layer: OnLayer | None) -> None: ...


class GpuRunner:
    """Implements `OverlapRunner`. One thread at a time may call it, always on the same stream."""

    def __init__(
        self,
        model: LoadedModel,
        inputs: StepInputs,
        launch_sampling: LaunchSampling,
        newest: Tensor,
        recorded: Recorded,
        with_adapters: Recorded,
        layer_listener: Callable[[], OnLayer | None] = lambda: None,
        draft_model: Follower | None = None,
        on_tower_layer: Callable[[], None] = lambda: None,
        late_rows: LateRows | None = None,
        late_inputs: StepInputs | None = None,
    ) -> None:
        """`newest`: int64 `[max_samples]` on the device, where the tokens sampled last are kept.

        A step in which nobody has an adapter is `recorded` without what adapters add.

        `layer_listener` is asked before each step who is to hear that the kernels of a layer are queued.
        `on_tower_layer` hears of each layer of the tower, as far as it is queued. `late_rows` is there for a model with
        recurrent layers whose requests may have drafts. `late_inputs`: of the second of two micro-batches.
        """
        self.model = model
        self._memory: WeightMemory | None = None
        self._inputs = inputs
        self._late_inputs = late_inputs
        self._launch_sampling = launch_sampling
        self._newest = newest
        self.recorded = recorded
        self.recorded_with_adapters = with_adapters
        self.layer_listener = layer_listener
        self.draft_model: DraftModel | None = draft_model
        self._follower = draft_model
        self._ends = StepEnds()
        self._sharing = None if model.communicator is None else model.communicator.experts
        self._on_tower_layer = on_tower_layer
        self._late_rows = late_rows

    @property
    def image_counts(self) -> ImageCounts:
        return self.model.image_counts

    @property
    def loras(self) -> Loras:
        return self.model.loras

    def memory(self) -> WeightMemory:
        """In any thread. It is the same at all times, and found when it is asked for first."""
        if self._memory is None:
            self._memory = self.model.memory()
        return self._memory

    @property
    def graph_use(self) -> GraphUse:
        parts = (self.recorded, self.recorded_with_adapters)
        late = [] if self._late_rows is None else [self._late_rows.graphs]
        kept = [*(each for part in parts for each in part), *late]
        return GraphUse(sum(map(len, kept)), sum(each.nbytes for each in kept), self._late_times)

    @property
    def _late_times(self) -> Sequence[tuple[int, float]]:
        return () if self._late_rows is None else self._late_rows.times

    def measure_late_rows(self, clock: Callable[[], float]) -> None:
        """Find out what it takes that states see what came true, as part of the warm-up."""
        if self._late_rows is not None:
            with torch.inference_mode():
                self._late_rows.measure(lambda: self.new_end()(), clock)

    def take_late_times(self, times: Sequence[tuple[int, float]]) -> None:
        """Say what was measured of a model of the same shape: where requests run nothing may be measured."""
        if self._late_rows is not None:
            self._late_rows.times = times

    @property
    def row_rungs(self) -> Sequence[int]:
        """The sizes of decode steps that are recorded."""
        return self.recorded.graphs.rungs

    @property
    def token_rungs(self) -> Sequence[int]:
        """The sizes of small steps with prompts that are recorded."""
        return self.recorded.pieces.rungs

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        """Write the batch's KV and sample."""
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Queue the forward pass; return the logits to be, good until the next step's.

        They are of the rows to sample from, and then of the prompt rows.
        """
        parts = halves_of_round(self._sharing, batch)
        batch = single_rows(batch)
        with torch.inference_mode():
            if batch.encodes:
                return self.model.encode(batch, self._on_tower_layer)
            self.loras.change()
            if self.model.communicator is not None and (batch.input_ids < 0).any():
                self.model.communicator.broadcast(self._newest)
            logits = self._between_states(batch) if parts is None else self._both(parts)
            self.loras.end(batch.adapters)
            if self._follower is not None and batch.is_followed:
                self._follower.follow(batch, self._newest, self.layer_listener())
            return logits

    def new_end(self) -> WaitForEnd:
        """Return what waits until the device has done what is queued so far."""
        return StreamMark().wait

    def serve_others(self) -> None:
        """Take part in a step of schedulers that share our experts, without a token."""
        with torch.inference_mode():
            if halves_of_round(self._sharing, None) is not None:
                self.model.forward_both(NOBODYS, self._newest.device)
                return
            graphs, pieces = self.recorded
            if (rung := self._rung_of(self._inputs.nobodys, graphs.rungs)) is None:
                self._token_rung_of(self._inputs.nobodys, pieces)
                self.model.serve_others(self._newest.device)
            else:
                states = self.model.states
                nobodys = self._inputs.nobodys if states is None else states.before(self._inputs.nobodys)
                self._replayed(nobodys, rung, graphs)

    def sample(self, batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> WaitForResult:
        """Queue the choice of the batch's tokens; the logits may be overwritten."""
        with torch.inference_mode():
            sampled = self._launch_sampling(batch, logits, sampling)
            self.take(sampled.token_ids)
            return sampled.start_copy(self._ends)

    def take(self, token_ids: Tensor) -> None:
        """Queue that placeholders of the next step stand for these, int64 on the device."""
        self._newest[: len(token_ids)].copy_(token_ids)

    def _between_states(self, batch: ForwardBatch) -> Tensor:
        """Queue the step, and the copies of its states before and behind it. Before it, they see what came true."""
        states = self.model.states
        if states is None:
            return self._queue(batch)
        assert batch.row_lens is None or batch.row_lens.max() <= states.row_tokens, "a row is longer than is kept of it"
        batch = states.before(batch)
        if self._late_rows is not None and batch.states is not None:
            self._late_rows.queue(batch.states)
        logits = self._queue(batch)
        states.behind(batch)
        return logits

    def _queue(self, batch: ForwardBatch) -> Tensor:
        graphs, pieces = self.recorded if batch.adapters is None else self.recorded_with_adapters
        if (rung := self._rung_of(batch, graphs.rungs)) is not None:
            return self._replay(batch, rung, graphs)
        if (rung := self._token_rung_of(batch, pieces)) is not None:
            return self._replay_pieces(batch, rung, pieces)
        return self._launch(batch)

    def _rung_of(self, batch: ForwardBatch, rungs: Sequence[int]) -> int | None:
        """Before the first round all ranks that share experts run the same steps."""
        if self._sharing is None or self._sharing.round is None:
            return rung_of(batch, rungs)
        return common_rung_of(self._sharing.round, rungs)

    def _token_rung_of(self, batch: ForwardBatch, pieces: PieceGraphs) -> int | None:
        """In a round some ranks may replay and others launch: all exchange rows for as many as the rung has.

        Nothing is recorded in a round, for who records runs each piece twice. Who decodes beside prompts of others is
        replayed in pieces, too.
        """
        if self._sharing is None or self._sharing.round is None:
            return token_rung_of(batch, pieces.rungs)
        rung = common_token_rung_of(self._sharing.round, pieces.rungs)
        self._sharing.padded_rows = rung
        return None if has_rows(batch) or rung not in pieces else rung

    def _launch(self, batch: ForwardBatch) -> Tensor:
        """Queue kernel by kernel; first the tower's, of images whose rows are not there."""
        staged = self.model.with_rows(self._inputs.stage(batch), self._on_tower_layer)
        self.model.attention.init_forward_metadata(staged)
        return self._forward(staged, self.layer_listener())[: len(logits_rows(batch))]

    def _both(self, parts: Parts) -> Tensor:
        """Queue both halves of a step kernel by kernel. Collectives have a stream of their own."""
        assert self._late_inputs is not None, "a step has no halves without --overlap-batches"
        batches = [None if part is None else single_rows(part) for part in parts]
        at_hand = zip(batches, (self._inputs, self._late_inputs), self.model.attentions, strict=True)
        staged = [None if part is None else self._half(part, inputs, attention) for part, inputs, attention in at_hand]
        found = self.model.forward_both(staged, self._newest.device, self.layer_listener())
        pairs = ((part, logits) for part, logits in zip(batches, found, strict=True) if part is not None)
        return torch.cat([logits[: len(logits_rows(part))] for part, logits in pairs if logits is not None])

    def _half(self, batch: ForwardBatch, inputs: StepInputs, attention: PhasedAttention) -> StagedBatch:
        staged = self.model.with_rows(inputs.stage(batch), self._on_tower_layer)
        attention.init_forward_metadata(staged)
        self.loras.begin_staged(staged.adapters, staged.late_adapters)
        return replace(staged, input_ids=filled_in(staged.input_ids, self._newest))

    def _replay(self, batch: ForwardBatch, rung: int, graphs: Graphs) -> Tensor:
        """Queue a graph."""
        logits = self._replayed(batch, rung, graphs)
        self._report_layers()
        return logits[: batch.batch_size]

    def _replayed(self, batch: ForwardBatch, rung: int, graphs: Graphs) -> Tensor:
        """Queue a graph, capturing it first where there is none of this size; return the logits of all its rows."""
        if rung not in graphs:
            self._capture(batch, rung, graphs)
        staged = self._inputs.stage_padded(batch, rung)
        self.loras.begin_staged(staged.adapters, staged.late_adapters)
        self.model.attention.replay_metadata(staged)
        return graphs.replay(rung)

    def _capture(self, batch: ForwardBatch, rung: int, graphs: Graphs) -> None:
        """What is captured is run meanwhile, so nobody's state may take part: each would be a token further."""
        staged = self._inputs.stage_padded(batch, rung)
        if staged.state_slots is not None:
            staged.state_slots.fill_(NO_SLOT)
        self.model.attention.capture_metadata(staged)
        with self._rows_unchanged(rung), self._alike():
            graphs.capture(rung, lambda: self._forward(staged, None))

    def _replay_pieces(self, batch: ForwardBatch, rung: int, pieces: PieceGraphs) -> Tensor:
        """Queue a graph between each two layers' attention, capturing them first where there are none of this size."""
        staged = self._inputs.stage_filled_up(batch, rung)
        self.model.attention.init_forward_metadata(staged)
        if rung not in pieces:
            with self._rows_unchanged(rung), self._alike():
                pieces.record(rung, lambda recording: self._forward(_of_nobody(staged), None, recording))
        return self._forward(staged, self.layer_listener(), pieces.replayed(rung))[: len(logits_rows(batch))]

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """Have layers take the step for one of as many rows on all ranks, as each replay will be."""
        if self._sharing is None:
            yield
            return
        common, self._sharing.round = self._sharing.round, None
        try:
            yield
        finally:
            self._sharing.round = common

    @contextmanager
    def _rows_unchanged(self, num_tokens: int) -> Iterator[None]:
        """Have hidden rows as they were afterwards: what is captured reads them once more when it is replayed."""
        if self.model.rows is None:
            yield
            return
        rows = self.model.rows.of_step(num_tokens)
        before = rows.clone()
        yield
        rows.copy_(before)

    def _forward(self, staged: StagedBatch, on_layer: OnLayer | None, pieces: Pieces | None = None) -> Tensor:
        self.loras.begin_staged(staged.adapters, staged.late_adapters)
        run = at_once if pieces is None else pieces.run
        input_ids = run(lambda: filled_in(staged.input_ids, self._newest))
        return self.model.forward(replace(staged, input_ids=input_ids), on_layer, pieces)

    def _report_layers(self) -> None:
        """All layers of a replay are queued at once."""
        on_layer = self.layer_listener()
        if on_layer is not None:
            for layer in range(self.model.config.num_layers):
                on_layer(layer)


def _of_nobody(staged: StagedBatch) -> StagedBatch:
    """Return the step without its requests' states: what is run to be recorded must not advance them."""
    slots = staged.state_slots
    return staged if slots is None else replace(staged, state_slots=torch.full_like(slots, NO_SLOT))


def filled_in(input_ids: Tensor, newest: Tensor) -> Tensor:
    """Return `[num_tokens]` ids without placeholders; `newest` holds the tokens sampled last, int64.

    It does on the device what `stepping.fill_in` does on the host: nobody waits for the tokens.
    """
    sampled = newest[(-1 - input_ids).clamp_(min=0)].clamp_(min=0)
    return sampled.where(input_ids < 0, input_ids)
