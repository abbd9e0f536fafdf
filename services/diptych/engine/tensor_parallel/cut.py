"""Cuts a checkpoint's tensors to what one rank takes of them, as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from diptych.architectures.placement import Split
from diptych.checkpoints.quantization.weight import Stored, rows_of
from diptych.common.errors import ConfigError
from diptych.engine.tensor_parallel.shard import Cut
from diptych.kernels.quantized import Array, QuantizedArray, stack


def cut_tensors(
    tensors: Iterable[tuple[str, Stored]], placement: Sequence[tuple[str, tuple[Cut, ...]]]
) -> Iterator[tuple[str, Stored]]:
    """Yield each tensor as the rank's own placement describes it. Unknown ones pass, for the loader to refuse."""
    places = dict(placement)
    for name, tensor in tensors:
        yield name, _cut(name, tensor, places[name]) if name in places else tensor


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
