"""Which part of a model a tensor-parallel rank has. A checkpoint's tensors are cut to it as they are read.

Attention is split by heads, feed-forward networks by columns of the hidden layer, the vocabulary by tokens. Ranks that
outnumber the KV heads share them: neighbours hold the same one. A vocabulary that does not divide is padded. Experts
are split by columns, too, or dealt out whole (expert parallel): then a rank takes nothing of the others' matrices.
A rank of a pipeline's stage takes its part of the stage's layers, and nothing of the others. Feed-forward networks may
be split among more ranks than the rest: those of all schedulers that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diptych.architectures.config import ModelConfig
from diptych.architectures.fair_shares import check_divides, check_experts, check_shared
from diptych.architectures.placement import Piece, Placed, Split
from diptych.architectures.size import EXPERT, NETWORK
from diptych.architectures.stages import of_stage, target_in_stage
from diptych.checkpoints.quantization.weight import Stored, rows_of
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import Array, QuantizedArray, stack

Placement = Callable[[ModelConfig], Iterator[Placed]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of several."""

    rank: int
    size: int
    whole_experts: bool = False  # each rank has some, instead of a part of each
    owned: Callable[[int], Container[int]] | None = None  # by layer, where others share them, too; None: as above
    layers: range | None = None  # of the rank's stage; None: all
    network: Shard | None = None  # the same among those who share networks, where these are more ranks; None: as above

    def config(self, model: ModelConfig) -> ModelConfig:
        """Return the model as this rank's layers compute it; its vocabulary stays whole. Raises `ConfigError`."""
        cut = self._cut_layers(model)
        return cut if self.layers is None else of_stage(cut, self.layers)

    def _cut_layers(self, model: ModelConfig) -> ModelConfig:
        """Return the model with this rank's part of every layer."""
        check_divides(model, self.size)
        if self.whole_experts and model.moe is not None and self.owned is None:
            check_experts(model, self.size)
        if self.network is not None:
            check_shared(model, self.network.size)
        num_slices = self.size if self.network is None else self.network.size
        moe = model.moe and replace(
            model.moe,
            ffn_size=model.moe.ffn_size // (1 if self.whole_experts else self.size),
            own=self.own_experts(model.moe.num_experts) if self.whole_experts else None,
            shared_ffn_size=model.moe.shared_ffn_size // self.size,
        )
        wide = model.wide and replace(model.wide, num_kv_heads=max(1, model.wide.num_kv_heads // self.size))
        draft = model.draft and replace(model.draft, model=self._cut_layers(model.draft.model))
        return replace(
            model,
            draft=draft,
            num_heads=model.num_heads // self.size,
            num_kv_heads=max(1, model.num_kv_heads // self.size),
            ffn_size=model.ffn_size // num_slices,
            borrowing_ffn_size=model.borrowing_ffn_size // num_slices,
            wide=wide,
            moe=moe,
            recurrent=model.recurrent and model.recurrent.of_rank(self.size),
        )

    def own_experts(self, num_experts: int) -> range:
        """Return this rank's: neighbours, as many as other ranks have, or one more or less."""
        return range(self.rank * num_experts // self.size, (self.rank + 1) * num_experts // self.size)

    def has_elsewhere(self, piece: Piece) -> bool:
        """Return whether a matrix is of an expert that `owned` leaves to others."""
        return _is_foreign((piece,), self.owned)

    def vocab_rows(self, vocab_size: int) -> int:
        """Return how many tokens of the vocabulary each rank has, padding included."""
        return -(-vocab_size // self.size)

    def placement(self, model: ModelConfig, place: Placement) -> list[tuple[str, tuple[Cut, ...]]]:
        """Return for each tensor of the checkpoint what this rank takes of it, and where that goes.

        Of a tensor without cuts it takes nothing.
        """
        head = model.eagle and replace(model.eagle, num_rows=self.vocab_rows(model.eagle.num_rows))
        local = replace(self._cut_layers(model), vocab_size=self.vocab_rows(model.vocab_size), eagle=head)
        pairs = zip(place(model), place(local), strict=True)
        own = local.moe.own if local.moe else None
        owned = self.owned or (None if own is None else lambda layer: own)
        return [
            (name, () if _is_foreign(whole, owned) else self._cuts(model, whole, part))
            for (name, whole), (_, part) in pairs
        ]

    def _cuts(self, model: ModelConfig, whole: tuple[Piece, ...], part: tuple[Piece, ...]) -> tuple[Cut, ...]:
        cuts = tuple(self._cut(full, local) for full, local in zip(whole, part, strict=True))
        return cuts if self.layers is None else in_stage(cuts, self.layers, model.num_layers, tied=model.embeds_behind)

    def _cut(self, full: Piece, local: Piece) -> Cut:
        if full.split is Split.NONE:
            return Cut(full, local, 0)
        axis = 0 if full.split is Split.ROWS else 1
        place = self.network if self.network is not None and NETWORK.fullmatch(full.target) else self
        num_parts = -(-full.shape[axis] // local.shape[axis])  # fewer than ranks: neighbours take the same
        return Cut(full, local, place.rank * num_parts // place.size * local.shape[axis])


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank takes of a piece of the checkpoint."""

    full: Piece  # as the checkpoint has it
    local: Piece  # as the rank has it
    start: int  # first row or column, by the piece's split


def in_stage(cuts: tuple[Cut, ...], layers: range, num_layers: int, *, tied: bool) -> tuple[Cut, ...]:
    """Return the cuts as a stage calls where they go; none of a tensor that other stages have. `tied`: see there."""
    found = []
    for cut in cuts:
        target = target_in_stage(cut.full.target, layers, num_layers, tied=tied)
        if target is None:
            return ()
        found.append(replace(cut, local=replace(cut.local, target=target)))
    return tuple(found)


def _is_foreign(pieces: tuple[Piece, ...], owned: Callable[[int], Container[int]] | None) -> bool:
    """Return whether a tensor is a matrix of an expert of other ranks. What is added to results, all have."""
    if owned is None or not EXPERT.match(pieces[0].target):
        return False
    layer, _, expert, *_ = pieces[0].target.split(".")
    return len(pieces[0].shape) == 2 and int(expert) not in owned(int(layer))


def cut_tensors(
    tensors: Iterable[tuple[str, Stored]], placement: Sequence[tuple[str, tuple[Cut, ...]]]
) -> Iterator[tuple[str, Stored]]:
    """Yield each tensor as the rank's own placement describes it. Unknown ones pass, for the loader to refuse."""
    places = dict(placement)
    for name, tensor in tensors:
        if name not in places:
            yield name, tensor
        elif places[name]:
            yield name, _cut(name, tensor, places[name])


def _cut(name: str, tensor: Stored, cuts: tuple[Cut, ...]) -> Stored:
    expected = (sum(cut.full.shape[0] for cut in cuts), *cuts[0].full.shape[1:])
    if tensor.shape != expected:
        raise ConfigError(f"{name} is {tensor.shape}, the configuration says {expected}")
    parts, row = [], 0
    for cut in cuts:
        parts.append(_part(rows_of(tensor, slice(row, row + cut.full.shape[0])), cut))
        row += cut.full.shape[0]
    return parts[0] if len(parts) == 1 else _joined(parts)


def _part(piece: Stored, cut: Cut) -> Stored:
    match cut.full.split:
        case Split.NONE:
            return piece
        case Split.COLUMNS:
            start, end = cut.start, cut.start + cut.local.shape[1]
            return piece.columns(start, end) if isinstance(piece, QuantizedArray) else piece[:, start:end]
        case Split.ROWS:
            rows = rows_of(piece, slice(cut.start, cut.start + cut.local.shape[0]))
            return _padded(rows, cut.local.shape[0] - len(rows))


def _joined(parts: Sequence[Stored]) -> Stored:
    quantized = [part for part in parts if isinstance(part, QuantizedArray)]
    return stack(quantized) if quantized else np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


def _padded(rows: Stored, num_rows: int) -> Stored:
    """Add rows of zeros."""
    if num_rows == 0:
        return rows
    if not isinstance(rows, QuantizedArray):
        return _with_zeros(rows, num_rows)
    scales, mins = (None if each is None else _with_zeros(each, num_rows) for each in (rows.scales, rows.mins))
    return QuantizedArray(rows.code, _with_zeros(rows.codes, num_rows), scales, mins, rows.group)


def _with_zeros(rows: Array, num_rows: int) -> Array:
    return np.concatenate([rows, np.zeros((num_rows, *rows.shape[1:]), rows.dtype)])
