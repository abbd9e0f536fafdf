"""Which earlier tokens those of a step look at most, and what comes out of the last layer, for requests that ask.

Attention is computed a second time for a few queries, in plain torch: kernels keep no scores. Nothing is computed, and
no memory is taken, for a step in which nobody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.engine.attention.layer_constants import Ropes, kv_scales, rope_tables
from diptych.engine.attention.torch_backend import first_key, rotate, turns
from diptych.engine.runner.backends import Setting
from diptych.engine.values.batch import ForwardBatch, InsightRows
from diptych.engine.values.watched_layers import default_layer
from diptych.generation.attention_tokens import NOBODY, AttentionWish, TokenAttention
from diptych.generation.insight import HiddenStates, Insight

PAGES_AT_ONCE: Final = 256  # whose keys are copied


class WatchedKind:
    """Layers of one kind: their keys in the KV pool, and how queries meet them."""

    def __init__(self, setting: Setting) -> None:
        self.group = setting.group or 0
        self._config, self._kv, self._dtype = setting.config, setting.kv, setting.dtype
        self._bytes = self._kv.view(torch.uint8) if self._kv.dtype == torch.float8_e4m3fn else self._kv
        self._sinks = setting.sinks
        self._ropes: Ropes | None = setting.ropes  # a table is long: it is made when somebody asks first

    def rotated(self, queries: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Return the queries in rows of a layer's `qkv` as they meet keys, `[num_rows, num_heads, head_dim]`."""
        if self._ropes is None:
            self._ropes = rope_tables(self._config, self._kv)
        config, rope = self._config, self._config.rope_of(layer)
        heads = queries[:, : config.num_heads * config.head_dim].reshape(len(queries), -1, config.head_dim).clone()
        rotate(heads[..., rope.start :], *turns(self._ropes[rope][positions], self._dtype))
        return heads

    def weights(self, query: Tensor, pages: Tensor, position: int, layer: int) -> Tensor:
        """Return how much a token looks at each up to itself, in the mean over heads: `[position + 1]`, float32.

        `query`: `[num_heads, head_dim]`; `pages`: of its request, in order. What a sink takes is nobody's; what is
        behind a window gets nothing.
        """
        config, num_keys = self._config, position + 1
        grouped = query.float().view(config.num_kv_heads, -1, config.head_dim)
        parts = torch.split(pages[: -(-num_keys // self._kv.shape[3])], PAGES_AT_ONCE)
        products = [torch.einsum("hgd,nhd->hgn", grouped, self._keys(part, layer)) for part in parts]
        scores = torch.cat(products, dim=2)[..., :num_keys].flatten(0, 1) * config.score_scale
        if cap := config.attention_softcap:
            scores = cap * torch.tanh(scores / cap)
        first = int(first_key(torch.tensor(position), config.window(layer), chunked=config.chunked))
        scores[:, : max(0, first)] = -torch.inf
        if self._sinks is not None:
            scores = torch.cat([scores, self._sinks[layer, :, None]], dim=1)
        return scores.softmax(dim=1).mean(dim=0)[:num_keys]

    def _keys(self, pages: Tensor, layer: int) -> Tensor:
        """Return `[num_pages * page_size, num_kv_heads, head_dim]`, float32."""
        stored = self._bytes[pages, self._config.place(layer), 0].view(self._kv.dtype).float()
        if self._config.kv_scales:
            stored *= kv_scales(self._config, self._kv.dtype)[layer][0]
        return stored.flatten(0, 1)


class _Place(NamedTuple):
    """A layer among those of its kind."""

    kind: WatchedKind
    layer: int


class AttentionCapture:
    """Watches the steps of a model, one after the other."""

    def __init__(self, config: ModelConfig, kinds: Sequence[Setting]) -> None:
        """`config`: of the model; `kinds`: of `config.attending`, whose layers are counted without others."""
        self._config = config
        self._places: dict[int, _Place] = {}
        for setting in kinds:
            kind = WatchedKind(setting)
            for place, attending in enumerate(setting.layers or range(setting.config.num_layers)):
                self._places[config.attention_layers[attending]] = _Place(kind, place)

    def of_step(self, batch: ForwardBatch) -> StepCapture | None:
        """Return what watches a step; None: nobody asks."""
        if batch.insight is None:
            return None
        layers = [self._layers(wish.attention) for wish in batch.insight.wishes]
        return StepCapture(batch, batch.insight, layers, self._places)

    def _layers(self, wish: AttentionWish | None) -> tuple[int, ...]:
        return () if wish is None else wish.layers or (default_layer(self._config),)


@dataclass(frozen=True, slots=True, eq=False)
class StepCapture:
    """Implements `Watcher` for one step."""

    batch: ForwardBatch
    asked: InsightRows
    layers: Sequence[tuple[int, ...]]  # of each that asks
    places: Mapping[int, _Place]
    _queries: dict[int, Tensor] = field(default_factory=dict)  # of the layer that is computed
    _found: dict[tuple[int, int], tuple[list[int], list[float]]] = field(default_factory=dict)  # by row and layer
    _states: dict[int, bytes] = field(default_factory=dict)  # by row

    @property
    def _tokens(self) -> np.ndarray:
        """Return where in the step the tokens are behind which those are sampled of which it is asked."""
        tokens: np.ndarray = self.batch.sampled_tokens[self.asked.samples]
        return tokens

    def before(self, layer: int, qkv: Tensor) -> None:
        """Keep the queries of those that ask: attention may overwrite them."""
        if any(layer in layers for layers in self.layers):
            kind, place = self.places[layer]
            tokens = self._tokens
            positions = torch.from_numpy(self.batch.positions[tokens])
            self._queries[layer] = kind.rotated(qkv[torch.from_numpy(tokens)], positions, place)

    def behind(self, layer: int) -> None:
        """Find what they look at, now that all keys are in the pool."""
        queries = self._queries.pop(layer, None)
        if queries is None:
            return
        kind, place = self.places[layer]
        tokens, table = self._tokens, self.batch.of_group(kind.group).page_table
        owners, positions = self.batch.rows_of(tokens).tolist(), self.batch.positions[tokens].tolist()
        for row, (owner, position) in enumerate(zip(owners, positions, strict=True)):
            wish = self.asked.wishes[row].attention
            if wish is not None and layer in self.layers[row]:
                pages = torch.from_numpy(table[owner]).long()
                weights = kind.weights(queries[row], pages, position, place)
                self._found[row, layer] = _strongest(weights, wish)

    def out(self, normed: Tensor) -> None:
        """Keep what was given to the output projection for those that ask: samples are its first rows."""
        for row, (sample, wish) in enumerate(zip(self.asked.samples.tolist(), self.asked.wishes, strict=True)):
            if wish.hidden_states:
                self._states[row] = normed[sample].float().numpy().astype("<f4").tobytes()

    def result(self) -> dict[int, Insight]:
        """Return what was found, by sample: of one token each."""
        told: dict[int, Insight] = {}
        for row, (sample, wish) in enumerate(zip(self.asked.samples.tolist(), self.asked.wishes, strict=True)):
            values = self._states.get(row)
            states = None if values is None else HiddenStates(len(values) // 4, values)
            told[sample] = Insight(self._attention(row, wish.attention), states)
        return told

    def _attention(self, row: int, wish: AttentionWish | None) -> TokenAttention | None:
        if wish is None:
            return None
        found = [self._found[row, layer] for layer in self.layers[row]]
        positions = tuple(position for each, _ in found for position in each)
        weights = tuple(weight for _, each in found for weight in each)
        return TokenAttention(self.layers[row], wish.top_k, positions, weights)


def _strongest(weights: Tensor, wish: AttentionWish) -> tuple[list[int], list[float]]:
    """Return positions and weights of the `top_k` strongest, filled up with `NOBODY`."""
    start = max(0, len(weights) - wish.window) if wish.window else 0
    top = weights[start:].topk(min(wish.top_k, len(weights) - start))
    missing = wish.top_k - len(top.values)
    return (top.indices + start).tolist() + [NOBODY] * missing, top.values.tolist() + [0.0] * missing
