from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.sampling.logprobs import logprobs, reference_logprobs
from diptych.kernels.gpu.sampling.sampling import sampling_workspace


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    own = torch.empty(num_rows, device=logits.device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=logits.device)
    top = torch.empty(num_rows, num_top, device=logits.device)
    logprobs(logits, token_ids, own, top_ids, top, sampling_workspace(num_rows, vocab_size, logits.device))
    return own, top_ids, top


@pytest.mark.parametrize(("scale", "num_top"), [(0.1, 0), (3.0, 1), (3.0, 20), (1000.0, 5)])
def test_they_are_those_of_float64(device: torch.device, scale: float, num_top: int) -> None:
    num_rows, vocab_size = (3, 700) if device.type == "cpu" else (256, 151_936)
    logits = scale * torch.randn(num_rows, vocab_size, device=device)
    token_ids = torch.arange(num_rows, device=device) * 77
    found, expected = logprobs_of(logits, token_ids, num_top), reference_logprobs(logits, token_ids, num_top)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-6, atol=1e-5)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2].double(), expected[2], rtol=1e-6, atol=1e-5)


def test_equal_logits_come_in_the_order_of_their_tokens(device: torch.device) -> None:
    logits = torch.zeros(1, 400, dtype=torch.bfloat16, device=device)
    logits[0, [390, 140, 130, 7]] = torch.tensor([2.0, 2.0, 3.0, -0.0], dtype=torch.bfloat16, device=device)
    found = logprobs_of(logits, torch.tensor([130], device=device), 12)
    assert found[1].tolist() == [[130, 140, 390, *range(9)]]


def test_all_of_a_row_can_be_asked_for(device: torch.device) -> None:
    logits = torch.randn(1, 10, device=device)
    logits[0, 4] = -torch.inf
    found = logprobs_of(logits, torch.tensor([4], device=device), 10)
    assert found[0].tolist() == [-torch.inf]
    assert torch.equal(found[1], logits.argsort(descending=True))


def test_rows_without_a_token_get_zeros(device: torch.device) -> None:
    logits = torch.randn(2, 300, device=device)
    logits[1, 5] = torch.nan
    own, top_ids, top = logprobs_of(logits, torch.tensor([3, -1], device=device), 2)
    assert [own[1].item(), *top_ids[1].tolist(), *top[1].tolist()] == [0] * 5
    assert own[0] == logprobs_of(logits[:1], torch.tensor([3], device=device), 2)[0]


def test_a_row_with_a_nan_has_none(device: torch.device) -> None:
    logits = torch.randn(2, 300, device=device)
    logits[1, 5] = torch.nan  # which a mask may keep from being chosen
    own, _, top = logprobs_of(logits, torch.tensor([3, 4], device=device), 1)
    assert [own.isnan().tolist(), top.isnan().flatten().tolist()] == [[False, True]] * 2
