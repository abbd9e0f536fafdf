"""Bytes across the bus, in the interpreter or by a real GPU that reads and writes pinned memory."""

from __future__ import annotations

import pytest
import torch

from diptych.kernels.gpu.pages.bus_copy import TILE_WORDS, bus_copy


def host_memory(num_words: int, device: torch.device) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31 - 1, (num_words,), dtype=torch.int32)
    return words.pin_memory() if device.type == "cuda" else words


@pytest.mark.parametrize("num_words", [0, 1, 3, 4, TILE_WORDS, TILE_WORDS + 5, 17 * TILE_WORDS + 1])
def test_words_arrive_and_nothing_beside_them(num_words: int, device: torch.device) -> None:
    there = torch.full((num_words + 8,), 7, dtype=torch.int32, device=device)
    source, back = host_memory(num_words, device), host_memory(num_words + 8, device)
    beside = back[num_words:].clone()
    bus_copy(there[:num_words], source, device)
    bus_copy(back[:num_words], there[:num_words], device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(there[:num_words].cpu(), source)
    assert (there[num_words:] == 7).all()
    assert torch.equal(back[:num_words], source)
    assert torch.equal(back[num_words:], beside)


def test_what_is_not_whole_words_or_of_other_length_is_refused(device: torch.device) -> None:
    odd = torch.zeros(3, dtype=torch.uint8, device=device)
    with pytest.raises(AssertionError):
        bus_copy(odd, odd, device)
    with pytest.raises(AssertionError):
        bus_copy(odd[:0], odd, device)
