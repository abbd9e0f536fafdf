"""Times work on a GPU by the GPU's own clock, without the host's launches in it."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

ROUNDS: Final = 20
WARM_S: Final = 0.05  # clocks rise, caches settle


def seconds_each(runs: Sequence[Callable[[], object]], rounds: int = ROUNDS, warm_s: float = WARM_S) -> float:
    """Return the median seconds of one of `runs`, which are captured together and replayed.

    Each of them should read memory of its own, more than the L2 cache in all: else it is the cache that is measured.
    They must not allocate memory that outlives them, nor wait for the device.
    """
    for run in runs:  # what is compiled at the first call is compiled here
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    _warm_up(graph.replay, warm_s)
    return _median_s(graph.replay, rounds) / len(runs)


def speeds(work: float, peers: Mapping[str, Callable[[], Sequence[Callable[[], object]]]]) -> dict[str, float]:
    """Return `work` by the second of those that can run here; say why of the others."""
    found = {}
    for name, runs in peers.items():
        try:
            found[name] = work / seconds_each(runs())
        except Exception as error:  # another project's, of any kind
            print(f"no {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def seconds_eager(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The same of what can't be captured: launches are in it where the GPU waits for them."""
    run()
    _warm_up(run)
    return _median_s(run, rounds)


def _warm_up(run: Callable[[], object], warm_s: float = WARM_S) -> None:
    began = time.perf_counter()
    while time.perf_counter() < began + warm_s:
        run()
        torch.cuda.synchronize()


def _median_s(run: Callable[[], object], rounds: int) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))) / 1e3
