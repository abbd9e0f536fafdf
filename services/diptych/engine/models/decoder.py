"""A decoder-only transformer: what all families share. What differs between them is in the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.axial_rope import AxialRope
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.ends import RELEASED, new_ends
from diptych.engine.models.layer import Layer, new_layer
from diptych.engine.models.layers.attention import Projections
from diptych.engine.models.layers.buffers import Buffers, Widths
from diptych.engine.models.layers.layer_communicator import LayerCommunicator, Layout, Stream
from diptych.engine.models.layers.recurrent import trials
from diptych.engine.models.layers.recurrent.trials import LayerStates
from diptych.engine.models.layers.row_joint import HeadJoint, RowJoint
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.operations import Operation, in_order
from diptych.engine.models.passage import Passage, Rows, halves_of, run_in_turn
from diptych.engine.models.pieces import Pieces, at_once
from diptych.engine.models.stages import Stages
from diptych.engine.models.vision_tower import VisionTower
from diptych.engine.values.batch import OnLayer

ENDS: Final = 0  # a part of a model; layer i is part 1 + i


_NOTHING: Final = Layer(None, None, None, None, None, None, None, None, None)


class Decoder:
    """A loaded model, or a stage of one. It keeps no state between steps: the KV pool is the attention backend's."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, dtype: torch.dtype, stages: Stages | None = None
    ) -> None:
        """`stages`: of the pipeline, if the layers of `config` are those of a stage."""
        self._config = config
        self._stages = stages
        self._ops = ops
        self._dtype = dtype
        adds_rows = config.tower is not None and bool(config.tower.taps)
        # at the end of such layers stands something else, or all of their rows are looked at
        may_scatter = not (config.layer_scales or adds_rows or config.taps or stages is not None)
        self._communicator = LayerCommunicator(ops, config.rms_norm_eps, config.residual_scale, may_scatter=may_scatter)
        self._head = None if config.eagle is None else HeadJoint.build(config, weights, ops)
        self._joint = RowJoint.build(config, weights, ops) if config.joins_rows and self._head is None else None
        self._taps = {layer: place for place, layer in enumerate(config.taps)}
        self._ends = new_ends(config, noted := weights.noted(), ops, dtype)
        self.made_of = [noted.names]  # the names of what each part is made of: of `ENDS`, then of the layers
        self._places = {layer: place for place, layer in enumerate(config.attention_layers)}
        self._widths = [Widths.of_layer(config, index) for index in range(config.num_layers)]
        self._widest = Widths(*map(max, zip(*self._widths, strict=True)))
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(new_layer(config, noted := weights.noted(), ops, index))
            self.made_of.append(noted.names)
        self._axial = None if config.mrope is None else AxialRope(config, weights.device)
        self.tower = None if config.tower is None else _new_tower(config, noted := weights.noted(), dtype)
        if self.tower is not None:
            self.made_of.append(noted.names)
        *first, last = self.layers  # the last one's attention is picked from, as latents
        self._decompressed = [*(layer.decompressed() for layer in first), last]

    def replace(self, part: int, weights: Weights) -> None:
        """Make a part anew, `ENDS` or 1 + the index of a layer, of what it is `made_of`. No step may run.

        Behind the layers is the tower, in a model that has one.
        """
        if part == ENDS:
            self._ends = new_ends(self._config, weights, self._ops, self._dtype)
            return
        index = part - 1
        if index == len(self.layers):
            self.tower = _new_tower(self._config, weights, self._dtype)
            return
        self.layers[index] = self._decompressed[index] = layer = new_layer(self._config, weights, self._ops, index)
        if index < len(self.layers) - 1:
            self._decompressed[index] = layer.decompressed()

    def release(self) -> None:
        """Drop what all parts are made of. No step may run until each was made anew."""
        self._ends = RELEASED
        self.layers[:] = self._decompressed[:] = [_NOTHING] * len(self.layers)
        self.tower = None

    def forward(
        self,
        batch: StagedBatch,
        attention: PhasedAttention,
        on_layer: OnLayer | None = None,
        pieces: Pieces | None = None,
        states: LayerStates | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """Run the new tokens of `batch`; return the logits `[num_rows, vocab_size]` of its `logits_rows`.

        Of a model that pools, return the normed hidden states `[num_rows, hidden_size]` instead.

        `attention` was told of the batch before. After the last attention only `logits_rows` are computed. All before
        it goes through `pieces`; without them it is computed at once, in new memory. `states` is that of a model with
        recurrent layers. `rows` are there for a model that joins them, and for the one that it guesses for: both write
        their own, the first those of `logits_rows`, the other one all. They are what the output projection is given, or
        with an EAGLE head what is made of the layers that it taps, and what comes out of its own.
        """
        own = self._passage(batch, attention, self._is_last_elsewhere(), pieces)
        own.on_layer, own.states, own.rows = on_layer, states, rows
        run = at_once if pieces is None else pieces.run
        self._resume(own, run(partial(self._begin, own)))
        for index in range(len(own.held)):
            if index:
                run(partial(self._go_on, own, index))
            self._look_back(own, index)
        in_order(self._last(own))
        return own.logits

    def forward_both(
        self,
        micro_batches: Sequence[tuple[StagedBatch, PhasedAttention] | None],
        device: torch.device,
        on_layer: OnLayer | None = None,
    ) -> list[Tensor | None]:
        """Run two micro-batches of a round, each with an attention that was told of it; return their logits.

        While tokens of one are on their way to experts or back, the other computes. Each takes part in its half of the
        round, of which we may have no token: None.
        """
        experts = self._ops.ranks.experts
        halves = halves_of(experts)
        passages = [
            None if each is None else self._passage(*each, half.are_any_picked)
            for each, half in zip(micro_batches, halves, strict=True)
        ]
        for last in [own for own in passages if own is not None][-1:]:
            last.on_layer = on_layer  # with it all of a layer is computed
        lists = [
            self._for_others(device, is_last_anywhere=half.are_any_picked) if own is None else self._operations(own)
            for own, half in zip(passages, halves, strict=True)
        ]
        run_in_turn(lists, experts, halves)
        return [None if own is None else own.logits for own in passages]

    def _passage(
        self, batch: StagedBatch, attention: PhasedAttention, is_last_anywhere: bool, pieces: Pieces | None = None
    ) -> Passage:
        """What is recorded in pieces has latents as they are."""
        layers = self._decompressed if pieces is None and attention.decompresses else self.layers
        new = self.new_buffers(len(batch.input_ids), batch.input_ids.device) if pieces is None else pieces.buffers
        held = self._of_layers(new.first(len(batch.positions)))
        turns = None if self._axial is None else self._axial.turns(batch)
        return Passage(layers, batch, attention, self._of_layers(new), held, turns, is_last_anywhere)

    def _operations(self, own: Passage) -> Iterator[Operation]:
        """Yield all that there is to do for a micro-batch."""
        yield lambda: self._resume(own, self._begin(own))
        for index in range(len(own.held)):
            if index:
                yield from self._between(own, index)
            yield partial(self._look_back, own, index)
        yield from self._last(own)

    def _resume(self, own: Passage, x: Tensor) -> None:
        own.stream = self._communicator.resume(x, len(own.buffers[0].normed))

    def _go_on(self, own: Passage, index: int) -> None:
        in_order(self._between(own, index))

    def _last(self, own: Passage) -> Iterator[Operation]:
        """Yield what is behind the last attention: of the tokens alone whose logits are wanted."""
        if not self._config.has_last_layer:
            yield partial(self._hand_on, own)
            return
        wanted = own.batch.logits_rows
        picked, last = own.buffers[-1].picked(wanted), self._communicator.pick(own.stream, wanted)
        if len(wanted):
            yield from self._finishing(self.layers[-1], last, picked)
        elif own.is_last_anywhere:
            yield from self.layers[-1].serve_others(picked.normed)
        yield partial(self._conclude, own, last, picked)

    def _conclude(self, own: Passage, last: Stream, picked: Buffers) -> None:
        """Behind the last layer: from hidden states to logits."""
        own.logits = logits = self._made_of(last, picked)
        if own.batch.watcher is not None:
            own.batch.watcher.out(picked.normed)
        if self._stages is not None:
            self._stages.bring_back(logits)
        if self._head is not None:
            assert own.rows is not None
            out = last.x[: own.batch.host.num_samples]
            own.rows.of_step(len(out)).copy_(out)
        elif own.rows is not None:
            self._keep(own.rows, own.batch, own.stream, picked, own.buffers[-1])

    def _made_of(self, last: Stream, picked: Buffers) -> Tensor:
        """Nothing is launched for no token."""
        if not len(picked.normed):
            return last.x.new_empty(0, self._config.output_size)
        return self._ends.logits(picked.normed) if self._config.pooling is None else picked.normed.clone()

    def _hand_on(self, own: Passage) -> None:
        """Finish the last layer of a stage for all tokens, and send them on; the logits are rank 0's."""
        assert self._stages is not None
        in_order(self._finishing(self.layers[-1], own.stream, own.buffers[-1]))
        self._stages.send(own.stream.x)
        own.logits = own.stream.x.new_empty(len(own.batch.logits_rows), self._config.output_size)
        self._stages.bring_back(own.logits)

    def serve_others(self, device: torch.device) -> None:
        """Take part in a step of others without a token: compute what of their tokens comes to experts of ours."""
        in_order(self._for_others(device, is_last_anywhere=self._is_last_elsewhere()))

    def _for_others(self, device: torch.device, *, is_last_anywhere: bool) -> Iterator[Operation]:
        nothing = torch.empty(0, self._config.hidden_size, dtype=self._dtype, device=device)
        for layer in self.layers if is_last_anywhere else self.layers[:-1]:
            yield from layer.serve_others(nothing)

    def _is_last_elsewhere(self) -> bool:
        """Whether ranks that share our experts compute the last layer, though we may have no token for it."""
        experts = self._ops.ranks.experts
        return experts is not None and experts.round is not None and experts.round.are_any_picked

    def _keep(self, rows: Rows, batch: StagedBatch, stream: Stream, picked: Buffers, whole: Buffers) -> None:
        """Write the hidden rows of a step's tokens. What logits are made of is computed as without."""
        num_tokens, num_picked = len(batch.positions), batch.host.num_samples
        if self._taps:
            rows.reduce(num_tokens)
            return
        if self._joint is not None or num_picked == num_tokens:
            own = picked.normed[:num_picked]
            rows.of_step(len(own)).copy_(own)
            return
        in_order(self._finishing(self.layers[-1], stream, whole))
        rows.of_step(num_tokens).copy_(whole.normed[:num_tokens])

    def _of_layers(self, buffers: Buffers) -> Sequence[Buffers]:
        """Return the buffers of each layer, in the same memory: layers of equal widths share them."""
        of_widths = {widths: buffers.narrowed(widths) for widths in set(self._widths)}
        return [of_widths[widths] for widths in self._widths]

    def _look_back(self, own: Passage, index: int) -> None:
        """What a layer makes of each token and of those before it."""
        layer, buffers, batch = own.layers[index], own.held[index], own.batch
        if own.turns is not None and self._axial is not None:
            self._axial.apply(buffers.qkv, own.turns)
        if layer.mixer is not None:
            assert own.states is not None
            mixed = buffers.projected, own.states, batch, buffers.mixed
            trials.mix(layer.mixer, self._ops.state_rules, index, *mixed)
        if index in self._places:
            own.attend(index, self._places[index])
        if own.on_layer is not None:
            own.on_layer(index)

    def new_buffers(self, num_tokens: int, device: torch.device) -> Buffers:
        """Return what a step of so many tokens needs for its pieces."""
        return Buffers.allocate(self._config, self._widest, num_tokens, self._dtype, device)

    def _begin(self, own: Passage) -> Tensor:
        """From tokens to the first attention; return this rank's rows of the residual stream."""
        batch, rows, buffers, first = own.batch, own.rows, own.buffers[0], own.layers[0]
        x = self._ends.embedded(batch.input_ids) if self._config.has_first_layer else self._received(batch.input_ids)
        own.place_rows(x)
        if self._joint is not None:
            assert rows is not None
            assert batch.rows_before is not None
            x = self._joint.joined(x, rows.table[batch.rows_before])
        if self._head is not None:
            assert rows is not None
            assert batch.rows_before is not None
            return self._begin_beside(first, x, rows.table[batch.rows_before], buffers)
        if self._ends.per_layer is not None:
            self._ends.per_layer.fill(batch.input_ids, x, buffers.per_layer)
        stream = self._communicator.begin(x)
        self._communicator.give(stream, self._ends.input_norm, buffers.normed)
        first.project_in(buffers)
        return stream.x

    def _begin_beside(self, layer: Layer, embedded: Tensor, before: Tensor, buffers: Buffers) -> Tensor:
        """The stream of a head begins with the rows `before`; its attention reads embeddings, too."""
        assert self._head is not None
        stream = self._communicator.begin(before)
        layer.project_in(replace(buffers, normed=self._head.beside(embedded, before)))
        return stream.x

    def _between(self, own: Passage, index: int) -> Iterator[Operation]:
        """From the attention before to that of layer `index`."""
        before, stream = own.layers[index - 1], own.stream
        yield from self._finishing(before, stream, own.buffers[index - 1])
        batch = own.batch
        if batch.image_tokens is not None and batch.image_rows is not None and index < len(batch.image_rows):
            yield partial(self._add_image_rows, own, index)
        yield partial(own.layers[index].project_in, own.buffers[index])
        if own.rows is not None and index - 1 in self._taps:
            yield partial(own.rows.tap, self._taps[index - 1], stream.x)

    def _add_image_rows(self, own: Passage, index: int) -> None:
        batch = own.batch
        assert batch.image_rows is not None
        own.stream.x[batch.image_tokens] += batch.image_rows[index]
        self._communicator.give(own.stream, own.layers[index - 1].next_norm, own.buffers[index - 1].normed)

    def _received(self, input_ids: Tensor) -> Tensor:
        """Wait for what comes of these tokens out of the stage before."""
        assert self._stages is not None
        x = torch.empty(len(input_ids), self._config.hidden_size, dtype=self._dtype, device=input_ids.device)
        self._stages.receive(x)
        return x

    def _finishing(self, layer: Layer, stream: Stream, buffers: Buffers) -> Iterator[Operation]:
        """From what attention of a layer found to the next one's normed input."""
        if layer.attention is not None:
            yield partial(self._project_out, layer, layer.attention, stream, buffers)
        if layer.ffn is not None:
            operations, found = layer.ffn.steps(buffers)
            yield from operations
            added = buffers.delta, layer.ffn_post_norm, layer.next_norm, buffers.normed
            yield lambda: self._communicator.add(stream, found(), *added)
        if layer.end is not None:
            yield partial(layer.end.finish, stream.x, buffers)

    def _project_out(self, layer: Layer, attention: Projections, stream: Stream, buffers: Buffers) -> None:
        found = attention.project_out(buffers)
        next_norm = layer.next_norm if layer.ffn is None else layer.ffn_norm
        wanted = Layout.WHOLE if layer.ffn is None else layer.ffn.reads(len(buffers.normed))
        added = buffers.delta, layer.attention_post_norm, next_norm, buffers.normed
        self._communicator.add(stream, found, *added, wanted)


def _new_tower(config: ModelConfig, weights: Weights, dtype: torch.dtype) -> VisionTower:
    assert config.tower is not None
    assert config.vision is not None
    return VisionTower(config.tower, config.vision, weights, dtype)
