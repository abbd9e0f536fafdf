from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.sampling.logits_adjust import (
    apply_bias,
    apply_penalties,
    apply_token_mask,
    reference_bias,
    reference_penalties,
    reference_token_mask,
)


def random_entries(num_rows: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Half of all tokens, each once."""
    rows, tokens = torch.nonzero(torch.rand(num_rows, vocab_size, device=device) < 0.5, as_tuple=True)
    return rows, tokens


def test_bias_is_added_to_the_tokens_listed_even_twice(device: torch.device) -> None:
    logits = torch.randn(3, 500, device=device)
    expected = logits.clone()
    rows, tokens = random_entries(3, 500, device)
    values = torch.randn(len(rows), device=device)
    values[100] = -torch.inf
    rows, tokens, values = (torch.cat([entries, entries[3:9]]) for entries in (rows, tokens, values))
    apply_bias(logits, rows, tokens, values)
    reference_bias(expected, rows, tokens, values)
    torch.testing.assert_close(logits, expected)
    assert logits.isneginf().sum() == 1


def test_penalties_change_what_rows_have_seen_bit_for_bit(device: torch.device) -> None:
    logits = torch.randn(3, 500, device=device)
    logits[0, :50] = -torch.inf
    expected = logits.clone()
    rows, tokens = random_entries(3, 500, device)
    repetition, subtract = 0.5 + torch.rand(len(rows), device=device), torch.randn(len(rows), device=device)
    apply_penalties(logits, rows, tokens, repetition, subtract)
    reference_penalties(expected, rows, tokens, repetition, subtract)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2100])
def test_a_mask_forbids_the_tokens_whose_bits_are_zero(device: torch.device, vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, device=device)
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), device=device).int()
    words[0] = -1
    expected = logits.clone()
    reference_token_mask(expected, words)
    before = logits[0].clone()
    apply_token_mask(logits, words)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[0], before)
