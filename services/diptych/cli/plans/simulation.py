"""What a simulation is made of, from the words of a command line. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

import numpy as np

from diptych.common.errors import ConfigError
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.generation.slo import Slo
from diptych.planner.planner import Planner
from diptych.planner.values import Observed, Plan
from diptych.router.choose.policies import POLICIES
from diptych.simulator.setup import Kill, WorkerSetup
from diptych.simulator.traces.call import Call, digest_of

ALL: Final = "all"  # policies
MAX_WORKERS: Final = 4096
_SECONDS: Final = re.compile(r"\d+(\.\d+)?")
_WORKERS: Final = re.compile(r"(?:(?P<role>[a-z]+)=)?(?P<number>\d+)")


def workers_of(texts: Sequence[str], worker: WorkerSetup) -> tuple[WorkerSetup, ...]:
    """Return so many workers as `prefill=2,decode=2` says; a number alone is of unified ones. Raises `ConfigError`."""
    workers: list[WorkerSetup] = []
    for text in texts:
        found = _WORKERS.fullmatch(text.strip())
        role = (found["role"] or Role.UNIFIED.value) if found else ""
        if found is None or role not in _ROLES:
            raise ConfigError(f"--workers: {text!r} is none of prefill=N, decode=N, unified=N")
        workers += [replace(worker, role=Role(role))] * min(int(found["number"]), MAX_WORKERS + 1)
    if len(workers) > MAX_WORKERS:
        raise ConfigError(f"--workers: at most {MAX_WORKERS} can be simulated")
    roles = {each.role for each in workers}
    if Role.UNIFIED not in roles and roles != {Role.PREFILL, Role.DECODE}:
        raise ConfigError("--workers: nobody can be served: give a prefill and a decode worker, or a unified one")
    return tuple(workers)


def policies_of(names: Sequence[str]) -> Sequence[str]:
    """Return the policies that are meant, each once. Raises `ConfigError`."""
    if ALL in names:
        return tuple(POLICIES)
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"--policy: there is no {unknown[0]!r}; use {', '.join(POLICIES)}, or {ALL}")
    return tuple(dict.fromkeys(names))


def kills_of(texts: Sequence[str], num_workers: int) -> tuple[Kill, ...]:
    """Return the deaths that `30:2` says: after 30 s, of the second worker. Raises `ConfigError`."""
    kills = []
    for text in texts:
        at, _, number = text.partition(":")
        if not (_SECONDS.fullmatch(at) and number.isdecimal() and 0 < int(number) <= num_workers):
            raise ConfigError(f"--kill: {text!r} is no T:WORKER, as 30:2 for the second of {num_workers} after 30 s")
        kills.append(Kill(float(at), int(number)))
    return tuple(kills)


@dataclass(slots=True)
class WatchedPlanner:
    """The product's planner, whose rounds are counted by their reasons."""

    planner: Planner = field(default_factory=Planner)
    reasons: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    last: Plan | None = None

    @property
    def every_s(self) -> float:
        return self.planner.every_s

    def __call__(self, observed: Observed) -> Plan:
        made = self.planner(observed)
        self.num_rounds += 1
        self.reasons.update(each.value for each in made.why)
        self.last = made
        return made

    @property
    def words(self) -> str:
        if self.last is None:
            return "no round: the calls had ended before"
        reasons = ", ".join(f"{why} {number}" for why, number in self.reasons.most_common())
        return f"{self.num_rounds} rounds ({reasons}), in the end {self.last.sizes}"


def platform_words(workers: Sequence[WorkerSetup]) -> str:
    """Say what is simulated."""
    numbers = ", ".join(f"{len(list(group))} {role}" for role, group in groupby(each.role.value for each in workers))
    worker = workers[0]
    whose = " on ".join(filter(None, (worker.step_model.model, worker.step_model.device))) or "an unnamed model"
    return f"{numbers}: {whose}, KV of {worker.num_pages * worker.page_size:,} tokens each"


def trace_words(calls: Sequence[Call]) -> str:
    """Say what a load is like."""
    span_s = calls[-1].arrival_s - calls[0].arrival_s
    prompt, output = (np.mean([getattr(call, name) for call in calls]) for name in ("prompt_len", "output_len"))
    rate = f"{len(calls) / span_s:.4g} a second, " if span_s else ""
    return (
        f"{len(calls)} calls, {rate}{prompt:,.0f} tokens of prompt and {output:,.0f} of output in the mean, "
        f"digest {digest_of(calls)}"
    )


def remarks(calls: Sequence[Call], slos: Mapping[str, Slo]) -> Iterator[str]:
    """Yield what to know of the SLOs of calls; `slos` are those of tiers."""
    if not any(slo.ttft_s or slo.tpot_s for slo in slos.values()):
        yield "no SLO is given, so each call that is served counts as good: see --ttft-slo-ms and --tpot-slo-ms"
    elif unknown := sorted({call.tier for call in calls} - {"", *slos}):
        yield f"calls of {', '.join(unknown)} have the SLO of all others: --slo-tiers does not name them"


_ROLES: Final = frozenset(role.value for role in WORKER_ROLES.values())
