"""Killed processes, restarts: everything is answered, nothing leaks, the output stays right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

Platform = Any
WORDS = ["w1 w2", "w3", "w4 w5 w6 w7 w8", "w9 " * 40]  # of the tiny model
NUM_TOKENS = 30
TIMING = "step=10000"  # microseconds: each client has a request under way whenever a process dies


class Load:
    """Known-answer requests that keep coming, one after another in each thread, and what became of them."""

    def __init__(self, platform: Platform, num_threads: int = 4) -> None:
        self.platform = platform
        self.expected = {prompt: platform.complete(prompt, NUM_TOKENS)["choices"][0]["text"] for prompt in WORDS}
        self.model = platform.model_id()
        self.right = 0
        self.errors: list[tuple[int, Any]] = []
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(num_threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, count: int, timeout_s: float = 200.0) -> None:
        """Wait until `count` more right answers have come."""
        wanted, deadline = self.right + count, time.monotonic() + timeout_s
        while self.right < wanted:
            assert time.monotonic() < deadline, f"{self.right} of {wanted} answers; errors: {self.errors[-3:]}"
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            prompt = WORDS[number % len(WORDS)]
            try:
                body = {"model": self.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
                status, answer = self.platform.post("/v1/completions", body)
            except OSError as error:
                status, answer = 0, str(error)
                self._stop.wait(0.2)
            if status != 200:
                self.errors.append((status, answer))
            elif answer["choices"][0]["text"] == self.expected[prompt]:
                self.right += 1
            else:
                self.wrong.append(answer["choices"][0]["text"])


@pytest.fixture(scope="module")
def pair(start_shared: Callable[..., Platform], tiny_folder: Path) -> Platform:
    """One worker of each role, simulated: what is killed comes back."""
    return start_shared(options=("--model", str(tiny_folder), "--device", "sim"), DIPTYCH_SIM_TIMING=TIMING)


@pytest.fixture(scope="module")
def two_pairs(start_shared: Callable[..., Platform], tiny_folder: Path) -> Platform:
    """Whoever is killed has some of the requests."""
    options = ("--model", str(tiny_folder), "--device", "sim")
    variables = {"DIPTYCH_POLICY": "least_load", "DIPTYCH_SIM_TIMING": TIMING}
    return start_shared(prefill=2, decode=2, options=options, **variables)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_killed_worker_costs_no_request_when_another_can_take_over(two_pairs: Platform, victim: str) -> None:
    platform = two_pairs
    survivors = {p.pid for name in ("prefill", "decode", "bootstrap", "router") for p in platform.components(name)}
    with Load(platform) as load:
        load.wait_for_more(8)
        dead = platform.kill(victim)
        load.wait_for_more(16)
    assert load.wrong == []
    assert load.errors == []
    assert survivors - {dead} <= {process.pid for process in platform.tree()}
    platform.assert_clean()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_requests_of_the_only_worker_are_answered_and_its_successor_is_used(pair: Platform, victim: str) -> None:
    platform = pair
    other = "decode" if victim == "prefill" else "prefill"
    others = {p.pid for name in (other, "bootstrap", "router") for p in platform.components(name)}
    with Load(platform) as load:
        load.wait_for_more(8)
        platform.kill(victim)
        load.wait_for_more(8)
    assert load.wrong == []
    assert others <= {process.pid for process in platform.tree()}
    assert all(status in (429, 503) for status, _ in load.errors)
    platform.assert_clean()


def members(platform: Platform) -> set[int]:
    return {instance.instance_id for instance in platform.instances() if instance.address}


def test_serving_goes_on_without_bootstrap_and_a_new_one_learns_everything(
    pair: Platform, wait_until: Callable[..., Any]
) -> None:
    platform = pair
    wait_until(lambda: len(members(platform)) == 3, 200.0, "the dead have left")
    before = members(platform)
    with Load(platform) as load:
        load.wait_for_more(4)
        platform.kill("bootstrap")
        load.wait_for_more(8)
    assert (load.wrong, load.errors) == ([], [])
    wait_until(lambda: members(platform) == before, 200.0, "the new bootstrap knows the old instances")


def test_a_killed_router_leaves_workers_clean_and_its_successor_serves(pair: Platform) -> None:
    platform = pair
    workers = {p.pid for name in ("prefill", "decode") for p in platform.components(name)}
    with Load(platform) as load:
        load.wait_for_more(4)
        platform.kill("router")
        load.wait_for_more(8)
    assert load.wrong == []
    assert workers <= {process.pid for process in platform.tree()}
    platform.assert_clean()


def test_no_process_spins_while_nothing_is_asked(pair: Platform, wait_until: Callable[..., Any]) -> None:
    """Who spins takes a whole core, at each look; what has just started may have something to do at the first."""
    pair.assert_clean()
    wait_until(lambda: max(shares_of_a_core(pair.tree()).values()) < 0.1, 200.0, "nobody takes a tenth of a core")


def shares_of_a_core(processes: list[psutil.Process]) -> dict[str, float]:
    """Return how much of a core each of them takes."""
    before = {p.pid: sum(p.cpu_times()[:2]) for p in processes}
    began = time.monotonic()
    time.sleep(3.0)  # the measurement itself
    elapsed_s = time.monotonic() - began
    used = {" ".join(p.cmdline()[2:5]): (sum(p.cpu_times()[:2]) - before[p.pid]) / elapsed_s for p in processes}
    print(*(f"{share:6.1%} {name}" for name, share in used.items()), sep="\n")
    return used


def test_ctrl_c_ends_everything_and_leaves_no_shared_memory(pair: Platform) -> None:
    """The last test of its platform, and so is the next one."""
    platform = pair
    platform.wait_until_ready()
    processes = platform.tree()
    assert shared_memory(processes) != set()
    platform.complete(WORDS[0], 2)
    assert platform.stop() == 0
    _, alive = psutil.wait_procs(processes, timeout=200)
    assert alive == []
    assert shared_memory(processes) == set()


def test_a_killed_supervisor_leaves_no_orphans(two_pairs: Platform) -> None:
    platform = two_pairs
    processes = platform.tree()
    platform.process.kill()
    _, alive = psutil.wait_procs(processes, timeout=200)
    assert alive == []
    assert shared_memory(processes) == set()


def shared_memory(processes: list[psutil.Process]) -> set[int]:
    """The System V segments that these processes, alive or not, have made. UCX keeps the KV pools in them."""
    pids = {process.pid for process in processes}
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    columns = {name: rows[0].index(name) for name in ("shmid", "cpid")}
    return {int(row[columns["shmid"]]) for row in rows[1:] if int(row[columns["cpid"]]) in pids}
