"""The same hand-offs by NIXL's Python API: page lists prepared on both sides, one write a request."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from diptych.kvtransfer.layout import PoolLayout

WARM_S: Final = 0.3


def open_agent(name: str, ordinal: int, nbytes: int) -> tuple[Any, torch.Tensor]:
    from nixl_cu13._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

    torch.cuda.set_device(ordinal)
    pool = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([pool])
    return agent, pool


def pages_of(address: int, layout: PoolLayout, ordinal: int) -> np.ndarray[Any, Any]:
    starts = address + np.arange(layout.num_pages, dtype=np.uint64) * np.uint64(layout.page_nbytes)
    sizes, devices = (np.full(layout.num_pages, value, dtype=np.uint64) for value in (layout.page_nbytes, ordinal))
    return np.stack([starts, sizes, devices], axis=1)


def measure(layout: PoolLayout, sizes_mb: tuple[int, ...], rounds: int) -> Iterator[tuple[int, int, list[float]]]:
    agent, pool = open_agent("one", 0, layout.nbytes)
    pool.view(torch.int64).random_()
    command = [sys.executable, __file__, str(layout.nbytes)]
    target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert target.stdin
    assert target.stdout
    metadata, address = next(line.split()[1:] for line in target.stdout if line.startswith("ready"))
    name = agent.add_remote_agent(bytes.fromhex(metadata))
    ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages_of(pool.data_ptr(), layout, 0), "VRAM")
    theirs = agent.prep_xfer_dlist(name, pages_of(int(address), layout, 1), "VRAM")
    random, began = np.random.default_rng(0), time.perf_counter()
    while time.perf_counter() < began + WARM_S:
        hand_off(agent, ours, theirs, [random.permutation(layout.num_pages)[:64].astype(np.int32) for _ in range(2)])
    for megabytes in sizes_mb:
        count = max(1, (megabytes << 20) // layout.page_nbytes)
        chosen = [random.permutation(layout.num_pages)[:count].astype(np.int32) for _ in range(2)]
        times = [hand_off(agent, ours, theirs, chosen) for _ in range(rounds)]
        yield megabytes, count * layout.page_nbytes, times
    target.stdin.close()
    target.wait(10)


def hand_off(agent: Any, ours: Any, theirs: Any, chosen: list[Any]) -> float:
    began = time.perf_counter()
    handle = agent.make_prepped_xfer("WRITE", ours, chosen[0], theirs, chosen[1], b"done")
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    seconds = time.perf_counter() - began
    assert state == "DONE", state
    agent.release_xfer_handle(handle)
    return seconds


def serve(nbytes: int) -> None:
    import os

    agent, pool = open_agent("other", 1, nbytes)
    print("ready", agent.get_agent_metadata().hex(), pool.data_ptr(), flush=True)
    while sys.stdin.read(1):
        pass
    os._exit(0)  # NIXL ends in a segmentation fault otherwise


if __name__ == "__main__":
    serve(int(sys.argv[1]))
