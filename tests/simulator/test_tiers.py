"""Workers with tiers in virtual time: routers count what a load takes, and takes whichever way is sooner."""

from __future__ import annotations

import random

import numpy as np
import pytest
from simulated import call, platform

from diptych.router.workers.worker_view import TierPrice
from diptych.simulator.run import simulate
from diptych.simulator.setup import Setup, TierSetup
from diptych.simulator.traces.call import Call

TEXTS = [[1000 * text + block for block in range(8)] for text in range(1, 13)]  # of 4,096 tokens each


def with_files(bytes_per_s: float, num_workers: int = 3) -> Setup:
    """Return unified workers whose pools have 600 pages: two texts and their outputs. A token has 1,000 bytes."""
    files = TierSetup(num_pages=4000, bytes_per_s=bytes_per_s)
    return platform("U" * num_workers, worker_changes={"num_pages": 601, "tiers": (files,)})


def asked(number: int, apart_s: float, seed: int = 0) -> list[Call]:
    """Return calls of which each goes on with one of the texts."""
    rng = random.Random(seed)
    return [call(n * apart_s, 4096 + 30, 4, *rng.choice(TEXTS), 10**6 + n) for n in range(number)]


def test_files_that_are_fast_are_loaded_where_they_lie_and_slow_ones_computed() -> None:
    """4 MB take 5 ms from fast files and 0.4 s from slow ones; to compute them takes 41 ms."""
    calls = asked(48, apart_s=0.5)
    fast, slow = (simulate(with_files(speed), calls) for speed in (1e9, 1e7))
    assert fast.failure == slow.failure == ("",) * 48
    came_again = fast.cached_len[24:]
    assert np.mean(came_again >= 4096) > 0.9, "each text lies somewhere by then"
    assert np.mean(fast.ttft_s[24:]) < 0.7 * np.mean(slow.ttft_s[24:])
    assert np.mean(slow.ttft_s) < 0.08, "nobody waits for slow files"


def test_it_pays_that_routers_know_what_a_load_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files take 20 ms, where computing takes 41. Whoever thinks that they take nothing queues for them."""
    setup, loads = with_files(2e8), [asked(100, 0.03, seed) for seed in (0, 1)]
    priced = [simulate(setup, calls).ttft_s.mean() for calls in loads]
    monkeypatch.setattr(TierPrice, "load_s", lambda price, num_tokens: 0.0)
    unpriced = [simulate(setup, calls).ttft_s.mean() for calls in loads]
    assert sum(priced) < 0.97 * sum(unpriced)
