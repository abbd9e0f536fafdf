"""An encoder: what the classes of BERT and ModernBERT share. It keeps nothing: each prompt is computed at once.

Products are those of `Ops`, attention is torch's, a prompt after the other: prompts of a step have unlike lengths, and
no token of one sees another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.architectures.config import ModelConfig, Rope
from diptych.architectures.encoder import EncoderActivation
from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.layer_constants import angle_table
from diptych.engine.attention.staged_batch import StagedBatch
from diptych.engine.attention.torch_backend import rotate, turns
from diptych.engine.models.layers.recurrent.trials import LayerStates
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.models.pieces import Pieces
from diptych.engine.values.batch import OnLayer

_ACTIVATIONS: Final[Mapping[EncoderActivation, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class _Span:
    """A prompt's rows in the batch, and what its tokens see."""

    rows: slice
    masks: Mapping[int, Tensor | None]  # by window: [num_tokens, num_tokens], True: attend; None: to all


class EncoderModel:
    """A loaded model. It is run as a `Decoder` is, and returns hidden states."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype) -> None:
        assert config.encoder is not None
        self._config, self._encoder, self._weights, self._dtype = config, config.encoder, weights, dtype
        self._activation = _ACTIVATIONS[self._encoder.activation]
        ropes = () if self._encoder.num_positions else {config.rope_of(layer) for layer in range(config.num_layers)}
        self._angles: dict[Rope, Tensor] = {rope: angle_table(rope, config.context_len) for rope in ropes}

    def forward(
        self,
        batch: StagedBatch,
        attention: PhasedAttention,
        on_layer: OnLayer | None = None,
        pieces: Pieces | None = None,
        states: LayerStates | None = None,
        rows: object = None,
    ) -> Tensor:
        """Return the hidden states `[num_rows, hidden_size]` of `logits_rows`; see `Decoder.forward`."""
        x, spans = self._embedded(batch), self._spans(batch)
        turning = {rope: turns(angles[batch.positions], self._dtype) for rope, angles in self._angles.items()}
        for layer in range(self._config.num_layers):
            x = self._layer(x, layer, spans, turning)
            if on_layer is not None:
                on_layer(layer)
        wanted = x[batch.logits_rows]
        return wanted if self._encoder.norms_behind else self._norm(wanted, "last_norm")

    def _embedded(self, batch: StagedBatch) -> Tensor:
        encoder, weights = self._encoder, self._weights
        x = weights.matrix("embed").rows(batch.input_ids)
        if encoder.num_positions:
            x = x + weights.matrix("positions").rows(batch.positions + encoder.first_position)
        if encoder.num_types:
            x = x + weights.matrix("types").rows(self._types(batch))
        return self._norm(x, "first_norm")

    def _types(self, batch: StagedBatch) -> Tensor:
        """Return which text of a pair each token is of."""
        types = torch.zeros_like(batch.input_ids)
        if self._encoder.separator < 0:
            return types
        is_separator = (batch.input_ids == self._encoder.separator).long()
        starts = batch.extend_starts.tolist()
        for start, end in pairwise(starts):
            before = is_separator[start:end].cumsum(0) - is_separator[start:end]
            types[start:end] = before.clamp(max=1)
        return types

    def _spans(self, batch: StagedBatch) -> list[_Span]:
        windows = {self._config.window(layer) for layer in range(self._config.num_layers)}
        starts = batch.extend_starts.tolist()
        return [
            _Span(slice(start, end), {window: _mask(end - start, window, batch.input_ids.device) for window in windows})
            for start, end in pairwise(starts)
        ]

    def _layer(self, x: Tensor, layer: int, spans: list[_Span], turning: Mapping[Rope, Tensor]) -> Tensor:
        attended, fed = f"{layer}.attention_norm", f"{layer}.ffn_norm"
        if self._encoder.norms_behind:
            x = self._norm(x + self._attend(x, layer, spans, turning), attended)
            return self._norm(x + self._feed(x, layer), fed)
        first = x if layer == 0 else self._norm(x, attended)  # embeddings are normed already
        x = x + self._attend(first, layer, spans, turning)
        return x + self._feed(self._norm(x, fed), layer)

    def _attend(self, x: Tensor, layer: int, spans: list[_Span], turning: Mapping[Rope, Tensor]) -> Tensor:
        config = self._config
        states = self._product(x, f"{layer}.qkv", 3 * config.hidden_size).view(len(x), -1, config.head_dim)
        if turning:
            rotate(states[:, : 2 * config.num_heads], *turning[config.rope_of(layer)])
        found = []
        for span in spans:
            queries, keys, values = torch.split(states[span.rows].transpose(0, 1)[None], config.num_heads, dim=1)
            mask = span.masks[config.window(layer)]
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            found.append(attended[0].transpose(0, 1).flatten(1))
        return self._product(torch.cat(found), f"{layer}.o", config.hidden_size)

    def _feed(self, x: Tensor, layer: int) -> Tensor:
        size = self._config.ffn_size
        inner = self._product(x, f"{layer}.up", 2 * size if self._encoder.gated else size)
        activated = self._activation(inner[:, :size])
        inner = activated * inner[:, size:] if self._encoder.gated else activated
        return self._product(inner, f"{layer}.down", self._config.hidden_size)

    def _product(self, x: Tensor, name: str, num_rows: int) -> Tensor:
        out, bias = x.new_empty(len(x), num_rows), self._weights.vector(f"{name}_bias")
        self._weights.matrix(name).multiply(x.contiguous(), out)
        return out if bias is None else out.add_(bias)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights.constant(name), self._weights.vector(f"{name}_bias")
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self._config.rms_norm_eps)


def _mask(num_tokens: int, window: int, device: torch.device) -> Tensor | None:
    """Return what tokens see that see fewer than `window` to either side; 0: all."""
    if not window or num_tokens <= window:
        return None
    places = torch.arange(num_tokens, device=device)
    return (places[:, None] - places).abs() < window
