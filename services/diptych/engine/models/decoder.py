"""A decoder-only transformer: what all families share. What differs between them is in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.models.arithmetic.axial_rope import AxialRope
from diptych.engine.models.arithmetic.ops import Ops
from diptych.engine.models.ends import RELEASED, new_ends
from diptych.engine.models.layer import Layer, new_layer
from diptych.engine.models.layers.buffers import Buffers, Widths
from diptych.engine.models.layers.layer_communicator import LayerCommunicator, Stream
from diptych.engine.models.layers.recurrent import trials
from diptych.engine.models.layers.recurrent.trials import LayerStates
from diptych.engine.models.layers.row_joint import HeadJoint, RowJoint
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.pieces import Pieces, at_once
from diptych.engine.models.stages import Stages
from diptych.engine.models.vision_tower import VisionTower
from diptych.engine.values.batch import OnLayer

ENDS: Final = 0  # a part of a model; layer i is part 1 + i


class Rows(Protocol):
    """Hidden rows of tokens, for a model that joins them to embeddings."""

    @property
    def table(self) -> Tensor:
        """`[num_places, hidden_size]`. No row is the row of a token that is the first of its request."""
        ...

    def of_step(self, num_tokens: int) -> Tensor:
        """Return where those of a step's tokens are written, `[num_tokens, hidden_size]`."""
        ...

    def tap(self, place: int, x: Tensor) -> None:
        """Take `[num_tokens, hidden_size]` that come out of a layer; `place`: of it among those that are tapped."""
        ...

    def reduce(self, num_tokens: int) -> None:
        """Make the rows of a step's tokens of what was tapped."""
        ...


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
        scale = config.embedding_scale
        self._embedding_scale = None if scale == 1 else torch.tensor(scale, dtype=dtype)  # rounded, as in training
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
        if pieces is None:
            pieces = Pieces(self.new_buffers(len(batch.input_ids), batch.input_ids.device), at_once)
            layers = self._decompressed if attention.decompresses else self.layers
        else:
            layers = self.layers
        buffers = self._of_layers(pieces.buffers)
        held = self._of_layers(pieces.buffers.first(len(batch.positions)))
        x = pieces.run(lambda: self._begin(layers, batch, buffers[0], rows))
        stream = self._communicator.resume(x, len(buffers[0].normed))
        turns = None if self._axial is None else self._axial.turns(batch)
        between = self._between if not self._taps else partial(self._between_tapped, rows)
        for index, own in enumerate(held):
            if index:
                pieces.run(partial(between, layers, index, stream, buffers, batch))
            if self._axial is not None and turns is not None:
                self._axial.apply(own.qkv, turns)
            self._look_back(layers, index, batch, attention, states, own)
            if on_layer is not None:
                on_layer(index)
        if not self._config.has_last_layer:
            return self._hand_on(stream, buffers[-1], len(batch.logits_rows))
        picked, last = buffers[-1].picked(batch.logits_rows), self._communicator.pick(stream, batch.logits_rows)
        logits = self._last(last, picked)
        if batch.watcher is not None:
            batch.watcher.out(picked.normed)
        if self._stages is not None:
            self._stages.bring_back(logits)
        if self._head is not None:
            assert rows is not None
            out = last.x[: batch.host.num_samples]
            rows.of_step(len(out)).copy_(out)
        elif rows is not None:
            self._keep(rows, batch, stream, picked, buffers[-1])
        return logits

    def _hand_on(self, stream: Stream, buffers: Buffers, num_rows: int) -> Tensor:
        """Finish the last layer of a stage for all tokens, and send them on; return the logits on rank 0."""
        assert self._stages is not None
        self._finish(self.layers[-1], stream, buffers)
        self._stages.send(stream.x)
        logits = stream.x.new_empty(num_rows, self._config.output_size)
        self._stages.bring_back(logits)
        return logits

    def serve_others(self, device: torch.device) -> None:
        """Take part in a step of others without a token: compute what of their tokens comes to experts of ours."""
        nothing = torch.empty(0, self._config.hidden_size, dtype=self._dtype, device=device)
        for layer in self.layers[:-1]:
            _serve_others(layer, nothing)
        if self._is_last_elsewhere():
            _serve_others(self.layers[-1], nothing)

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
        self._finish(self.layers[-1], stream, whole)
        rows.of_step(num_tokens).copy_(whole.normed[:num_tokens])

    def _of_layers(self, buffers: Buffers) -> Sequence[Buffers]:
        """Return the buffers of each layer, in the same memory: layers of equal widths share them."""
        of_widths = {widths: buffers.narrowed(widths) for widths in set(self._widths)}
        return [of_widths[widths] for widths in self._widths]

    def _look_back(
        self,
        layers: Sequence[Layer],
        index: int,
        batch: StagedBatch,
        attention: PhasedAttention,
        states: LayerStates | None,
        own: Buffers,
    ) -> None:
        """What a layer makes of each token and of those before it."""
        layer = layers[index]
        if layer.mixer is not None:
            assert states is not None
            trials.mix(layer.mixer, self._ops.state_rules, index, own.projected, states, batch, own.mixed)
        if index not in self._places:
            return
        if layer.growth is not None:
            layer.growth.apply(own.qkv, batch.positions)  # to rotate them before or afterwards is the same
        if batch.watcher is not None:
            batch.watcher.before(index, own.qkv)
        if layer.made is not None:
            attention.attend_decompressed(own.qkv, self._places[index], layer.made.attended(own), layer.made)
        else:
            attention.attend(own.qkv, self._places[index], own.attended)
        if batch.watcher is not None:
            batch.watcher.behind(index)

    def new_buffers(self, num_tokens: int, device: torch.device) -> Buffers:
        """Return what a step of so many tokens needs for its pieces."""
        return Buffers.allocate(self._config, self._widest, num_tokens, self._dtype, device)

    def _begin(self, layers: Sequence[Layer], batch: StagedBatch, buffers: Buffers, rows: Rows | None) -> Tensor:
        """From tokens to the first attention; return this rank's rows of the residual stream."""
        x = self._embedded(batch.input_ids) if self._config.has_first_layer else self._received(batch.input_ids)
        if batch.image_tokens is not None and batch.image_rows is not None:
            x[batch.image_tokens] = batch.image_rows[0]
        if batch.embed_tokens is not None and batch.embed_rows is not None and self._config.has_first_layer:
            x[batch.embed_tokens] = batch.embed_rows
        if self._joint is not None:
            assert rows is not None
            assert batch.rows_before is not None
            x = self._joint.joined(x, rows.table[batch.rows_before])
        if self._head is not None:
            assert rows is not None
            assert batch.rows_before is not None
            return self._begin_beside(layers[0], x, rows.table[batch.rows_before], buffers)
        if self._ends.per_layer is not None:
            self._ends.per_layer.fill(batch.input_ids, x, buffers.per_layer)
        stream = self._communicator.begin(x)
        self._communicator.give(stream, self._ends.input_norm, buffers.normed)
        self._project_in(layers[0], buffers)
        return stream.x

    def _begin_beside(self, layer: Layer, embedded: Tensor, before: Tensor, buffers: Buffers) -> Tensor:
        """The stream of a head begins with the rows `before`; its attention reads embeddings, too."""
        assert self._head is not None
        stream = self._communicator.begin(before)
        self._project_in(layer, replace(buffers, normed=self._head.beside(embedded, before)))
        return stream.x

    def _between_tapped(
        self,
        rows: Rows | None,
        layers: Sequence[Layer],
        index: int,
        stream: Stream,
        buffers: Sequence[Buffers],
        batch: StagedBatch,
    ) -> None:
        """`_between` where somebody reads what comes out of some layers."""
        self._between(layers, index, stream, buffers, batch)
        if rows is not None and index - 1 in self._taps:
            rows.tap(self._taps[index - 1], stream.x)

    def _between(
        self, layers: Sequence[Layer], index: int, stream: Stream, buffers: Sequence[Buffers], batch: StagedBatch
    ) -> None:
        """From the attention before to that of layer `index`."""
        self._finish(layers[index - 1], stream, buffers[index - 1])
        if batch.image_tokens is not None and batch.image_rows is not None and index < len(batch.image_rows):
            stream.x[batch.image_tokens] += batch.image_rows[index]
            self._communicator.give(stream, layers[index - 1].next_norm, buffers[index - 1].normed)
        self._project_in(layers[index], buffers[index])

    def _project_in(self, layer: Layer, buffers: Buffers) -> None:
        if layer.attention is not None:
            layer.attention.project_in(buffers)

    def _last(self, stream: Stream, buffers: Buffers) -> Tensor:
        """Finish the last layer for the tokens whose logits are wanted; return those. Nothing is launched for none."""
        if not len(buffers.normed):
            if self._is_last_elsewhere():
                _serve_others(self.layers[-1], buffers.normed)
            return stream.x.new_empty(0, self._config.output_size)
        self._finish(self.layers[-1], stream, buffers)
        return self._logits(buffers.normed) if self._config.pooling is None else buffers.normed.clone()

    def _received(self, input_ids: Tensor) -> Tensor:
        """Wait for what comes of these tokens out of the stage before."""
        assert self._stages is not None
        x = torch.empty(len(input_ids), self._config.hidden_size, dtype=self._dtype, device=input_ids.device)
        self._stages.receive(x)
        return x

    def _embedded(self, input_ids: Tensor) -> Tensor:
        x = self._ends.embed.rows(input_ids)
        return x if self._embedding_scale is None else x.mul_(self._embedding_scale)

    def _finish(self, layer: Layer, stream: Stream, buffers: Buffers) -> None:
        """From what attention of a layer found to the next one's normed input."""
        add, delta, normed = self._communicator.add, buffers.delta, buffers.normed
        if layer.attention is not None:
            found = layer.attention.project_out(buffers)
            next_norm = layer.next_norm if layer.ffn is None else layer.ffn_norm
            add(stream, found, delta, layer.attention_post_norm, next_norm, normed)
        if layer.ffn is not None:
            found = layer.ffn.forward(buffers)
            add(stream, found, delta, layer.ffn_post_norm, layer.next_norm, normed)
        if layer.end is not None:
            layer.end.finish(stream.x, buffers)

    def _logits(self, normed: Tensor) -> Tensor:
        logits = normed.new_empty(len(normed), self._config.output_size)
        self._ends.lm_head.multiply(normed, logits)
        if self._config.logits_divisor != 1:
            logits.div_(self._config.logits_divisor)
        cap = self._config.logits_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _serve_others(layer: Layer, nothing: Tensor) -> None:
    if layer.ffn is not None:
        layer.ffn.serve_others(nothing)


def _new_tower(config: ModelConfig, weights: Weights, dtype: torch.dtype) -> VisionTower:
    assert config.tower is not None
    assert config.vision is not None
    return VisionTower(config.tower, config.vision, weights, dtype)
