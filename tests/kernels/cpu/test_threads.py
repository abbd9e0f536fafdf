"""The thread pool: it shares itself between callers and sleeps when nobody calls."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from diptych.kernels.cpu import library
from diptych.kernels.cpu.linear import PackedMatrix


def test_callers_on_several_threads_all_get_their_own_results(num_threads: int) -> None:
    def call(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randint(-4, 5, (300, 40), generator=generator).float()
        x, out = torch.randint(-4, 5, (30, 40), generator=generator).float(), torch.empty(30, 300)
        matrix = PackedMatrix(weight)
        for _ in range(50):
            matrix.multiply(x, out.fill_(torch.nan))
            if not torch.equal(out, x @ weight.T):  # whole numbers: exact in any order
                return False
        return True

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(call, range(8)))


def test_an_idle_pool_does_not_spin() -> None:
    library.set_num_threads(4)
    out = torch.empty(30, 300)
    PackedMatrix(torch.ones(300, 40)).multiply(torch.ones(30, 40), out)
    used = [used_in(0.5) for _ in range(2)]  # it may take a while to fall asleep
    while used[-1] >= 0.2 and len(used) < 20:
        used.append(used_in(0.5))
    library.set_num_threads(1)
    assert used[-1] < 0.2, "of the CPU: four that spin use all they can get"


def used_in(seconds: float) -> float:
    before = time.process_time()
    threading.Event().wait(seconds)
    return time.process_time() - before


def test_the_number_of_threads_can_change_between_calls() -> None:
    matrix, x = PackedMatrix(torch.eye(200)), torch.arange(20 * 200.0).view(20, 200)
    for count in (3, 1, 2, 5, 1):
        out = torch.empty(20, 200)
        assert library.set_num_threads(count) == count
        matrix.multiply(x, out)
        assert torch.equal(out, x)
