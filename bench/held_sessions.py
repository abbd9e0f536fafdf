"""What it costs others that new sessions wait for memory of sessions that have begun: times to first tokens, on by off.

    python bench/held_sessions.py [--seed 0]

Simulates a prefill and a decode worker in virtual time. Loads without tools: chats, bursts, code assistants, and
prompts that have nothing in common, in pools that hold a fraction of them. And coding agents in a closed loop at
twice the memory, with chats of another tenant, or of the same one, beside them; of these loads only the chats count.
*Off*: nobody waits, and a prompt that is handed over is kept no longer than any other. Nothing in it depends on the
machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from unittest import mock

import numpy as np
from agents import run

from diptych.engine.cache import sessions
from diptych.engine.schedule.lines import session_line
from diptych.simulator.outcome import Outcome
from diptych.simulator.traces.call import Call, names_of
from diptych.simulator.traces.closed_loop import closed_loop
from diptych.simulator.traces.generators.named import generate

COLUMNS: Final = ("load", "requests", "mean off s", "on/off", "p99 off s", "on/off", "failed")
AGENTS_PAGES: Final = 788  # of the pools: half of what 300 calls of agents, of seed 0, have alive in the mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name, calls, num_pages in (
        ("chats", generate("chat", 600, 0.5, seed), 300),
        ("bursts", generate("bursty", 600, 2.0, seed), 300),
        ("unique prompts", unique(400, 1.0, seed), 300),
        ("code assistants, no tools", [replace(each, session="") for each in generate("code", 400, 0.2, seed)], 500),
        ("chats beside agents", beside(seed, "chats"), AGENTS_PAGES),
        ("chats beside agents, one tenant", beside(seed, ""), AGENTS_PAGES),
    ):
        print(row(name, calls, off(calls, num_pages), run(calls, num_pages, 0.9, 4.0)), flush=True)


def unique(num_calls: int, rate: float, seed: int) -> list[Call]:
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, num_calls))
    made = []
    for number, arrival_s in enumerate(at_s.tolist()):
        prompt_len = int(rng.integers(500, 20_000))
        names = names_of(np.arange(-(-prompt_len // 512)) + 1000 * (number + 1))
        made.append(Call(arrival_s, prompt_len, int(rng.integers(10, 300)), names))
    return made


def beside(seed: int, tenant: str) -> list[Call]:
    """Return agents and, beside them, one chat in four seconds, whose calls are marked by their tier."""
    agents = closed_loop(generate("coding_agents", 300, 0.6, seed))
    chats = [
        replace(each, tenant=tenant, session="", tier=CHAT, blocks=each.blocks ^ np.uint64(1 << 40))
        for each in generate("chat", 150, 0.25, seed + 100)
    ]
    return sorted([*agents, *chats], key=lambda call: call.arrival_s)


CHAT: Final = "chat"


def off(calls: Sequence[Call], num_pages: int) -> Outcome:
    with mock.patch.object(session_line, "MAX_WAIT_S", 0.0), mock.patch.object(sessions, "HANDED_S", 0.0):
        return run(calls, num_pages, 0.9, 4.0)


def row(name: str, calls: Sequence[Call], before: Outcome, now: Outcome) -> str:
    is_mixed = any(call.tier for call in calls)
    counted = np.array([not is_mixed or call.tier == CHAT for call in calls])
    was, is_now = before.ttft_s[counted], now.ttft_s[counted]
    cells = [name, str(counted.sum())]
    for first, second in ((was.mean(), is_now.mean()), (np.quantile(was, 0.99), np.quantile(is_now, 0.99))):
        cells += [f"{first:.3f}", f"{second / first:.3f}"]
    return f"| {' | '.join([*cells, str(sum(map(bool, now.failure)))])} |"


if __name__ == "__main__":
    main()
