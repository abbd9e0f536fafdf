"""Blanks have the forms of a model's tensors, and cost neither memory nor reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.architectures.next_layer import placement_of
from diptych.checkpoints.gguf_model import _spread
from diptych.checkpoints.quantization.weight import Stored
from diptych.checkpoints.source import BlankModel, ModelSource, open_model
from diptych.engine.models.matrices.dense import dense
from diptych.kernels.quantized import QuantizedArray, repeats, stack


def form(tensor: Stored) -> tuple[object, ...]:
    if isinstance(tensor, np.ndarray):
        return tensor.shape, tensor.dtype
    return tensor.shape, tensor.format


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_blanks_are_named_and_formed_as_what_is_stored(tiny_folder: Path, load_format: str) -> None:
    source = open_model(str(tiny_folder), load_format)  # type: ignore[arg-type]
    blanks = list(BlankModel(source).tensors())
    assert [(name, form(tensor)) for name, tensor in blanks] == [(n, form(t)) for n, t in source.tensors()]
    assert all(isinstance(tensor, np.ndarray) and repeats(tensor) for _, tensor in blanks)


def test_a_file_of_blocks_says_by_its_header_which_columns_can_not_be_parted(small_model: ModelSource) -> None:
    units, place = small_model.units(), placement_of(small_model.config)
    pieces = {name: piece for name, (piece, *_) in place(small_model.config)}
    stored = [(name, tensor) for name, tensor in small_model.blanks() if isinstance(tensor, QuantizedArray)]
    assert {units(name, pieces[name]) for name, _ in stored} == {32}
    assert all(units(name, pieces[name]) == tensor.unit for name, tensor in stored)
    assert units("model.norm.weight", pieces["model.norm.weight"]) == 1


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)], ids=str)
def test_a_block_is_spread_to_the_shape_of_its_tensor(shape: tuple[int, ...]) -> None:
    block = QuantizedArray("int4", np.zeros((1, 32), np.uint8), np.ones((1, 1), np.float16), np.ones((1, 1)), 32)
    found = _spread(block, shape)
    assert isinstance(found, QuantizedArray)
    assert (found.shape, found.format[:4]) == ((6, 64), block.format[:4])
    assert found.scales is not None
    assert found.scales.shape == (6, 2)


def test_what_repeats_one_number_is_stacked_and_filled_in_rightly() -> None:
    """They are no special case to those who compute with them: real weights may be of one number."""
    arrays = [QuantizedArray("float16", np.broadcast_to(np.float16(value), (2, 8))) for value in (3.0, 3.0, 5.0)]
    assert repeats(stack(arrays[:2]).codes)
    for some in (arrays[:2], arrays):
        rows = np.concatenate([each.codes for each in some]).astype(np.float32)
        assert np.array_equal(stack(some).codes, rows)
        for pieces in (some, [stack(some)]):
            assert torch.equal(dense(pieces, torch.float32), torch.from_numpy(rows))
