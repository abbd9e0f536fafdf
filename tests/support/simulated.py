"""Small platforms in virtual time, and calls to offer them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from diptych.common.members.roles import Role
from diptych.engine.values.step_model import StepModel
from diptych.engine.values.transfer_rules import TransferRules
from diptych.simulator.setup import Delays, Setup, WorkerSetup
from diptych.simulator.traces.call import Call, names_of

STEPS = StepModel(step=0.010, prompt_step=0.010, row=0.001, prompt_token=10e-6)
ROLES = {"P": Role.PREFILL, "D": Role.DECODE, "U": Role.UNIFIED}
QUIET = TransferRules(integrity="off")


def worker(role: str = "U", **changes: Any) -> WorkerSetup:
    sizes: dict[str, Any] = {"num_pages": 2001, "kv_token_bytes": 1000, "link_bytes_per_s": 1e9, "step_model": STEPS}
    return WorkerSetup(ROLES[role], **{**sizes, **changes})


def platform(roles: str, *, worker_changes: dict[str, Any] | None = None, **changes: Any) -> Setup:
    """Return a platform of one worker for each letter: P, D, or U."""
    workers = tuple(worker(role, **(worker_changes or {})) for role in roles)
    delays = Delays(leg_s=0.001, note_s=0.0001)
    return Setup(workers, **{"delays": delays, "transfer": QUIET, "context_len": 8192, **changes})


def call(arrival_s: float, prompt_len: int, output_len: int, *blocks: int) -> Call:
    names = names_of(np.array(blocks or range(-(-prompt_len // 512)), np.int64))
    return Call(arrival_s, prompt_len, output_len, names)


def chats(number: int, *, apart_s: float = 0.05, seed: int = 0, output_len: int = 40) -> list[Call]:
    """Return calls that go on with conversations which begin alike."""
    rng = random.Random(seed)
    texts = [[0, each] for each in range(1, 6)]
    fresh = iter(range(1000, 1 << 30))
    calls = []
    for each in range(number):
        text = rng.choice(texts)
        blocks = [*text, next(fresh)]
        if len(text) < 6:
            text.append(blocks[-1])
        prompt_len = 512 * len(blocks) - rng.randrange(512)
        calls.append(call(each * apart_s, prompt_len, rng.randrange(1, 2 * output_len), *blocks))
    return calls
