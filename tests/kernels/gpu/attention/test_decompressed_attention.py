from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest
import torch
from rounding import assert_rows_are_rounded
from torch import Tensor

from diptych.kernels.gpu.attention.decompressed_attention import (
    Found,
    Made,
    decompressed_attention,
    reference_decompressed_attention,
)

SCALE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One request; keys are made in pieces of `piece`."""

    context: int
    num_new: int
    piece: int
    num_heads: int = 3
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    dtype: torch.dtype = torch.float16


def attend(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what the kernel found, and what is right."""
    key_dim = case.nope_dim + case.rope_dim
    q = torch.randn(case.num_new, case.num_heads + 1, key_dim + 3, device=device).to(case.dtype)[:, :-1]
    nope, rope = q[..., : case.nope_dim], q[..., case.nope_dim + 3 :]
    keys = torch.randn(case.num_heads, case.context, case.nope_dim, device=device).to(case.dtype)
    values = torch.randn(case.num_heads, case.context, case.value_dim, device=device).to(case.dtype)
    rotated = torch.randn(case.context, 5 + case.rope_dim, device=device).to(case.dtype)[:, 5:]
    out = q.new_full((case.num_new, case.num_heads, case.value_dim + 2), float("nan"))[..., : case.value_dim]
    found = Found.allocate(case.num_new, case.num_heads, case.value_dim, device)
    first_position = case.context - case.num_new
    for begin in range(0, case.context, case.piece):
        here = slice(begin, begin + case.piece)
        made = Made(keys[:, here].contiguous(), values[:, here].contiguous(), rotated[here], begin)
        decompressed_attention(nope, rope, made, found, out, first_position=first_position, scale=SCALE)
    whole = Made(keys, values, rotated, 0)
    return out, reference_decompressed_attention(nope, rope, whole, first_position=first_position, scale=SCALE)


CASES: Final = {
    "a prompt in one piece": Case(70, 70, 70),
    "a prompt in pieces that no tile divides": Case(150, 150, 37),
    "new tokens behind a context": Case(300, 140, 128),
    "one new token": Case(90, 1, 40),
    "a piece ends where new tokens begin": Case(128, 64, 64),
    "keys that do not rotate": Case(80, 40, 50, rope_dim=0),
    "float32, odd sizes": Case(101, 51, 33, nope_dim=24, rope_dim=6, value_dim=20, dtype=torch.float32),
    "more dimensions than values": Case(64, 64, 64, nope_dim=64, value_dim=16),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_reference_computes_in_float64(name: str, device: torch.device) -> None:
    out, right = attend(CASES[name], device)
    assert_rows_are_rounded(out, right, CASES[name].dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("context", "num_new", "piece"), [(2048, 2048, 2048), (9000, 1111, 4096)])
def test_published_widths_are_what_the_reference_computes(context: int, num_new: int, piece: int) -> None:
    widths = {"num_heads": 16, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    out, right = attend(Case(context, num_new, piece, **widths, dtype=torch.bfloat16), torch.device("cuda"))
    assert_rows_are_rounded(out, right, torch.bfloat16)
