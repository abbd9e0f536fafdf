"""Sums up pools for `diptych status`, over the workers that answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.cli.requests.answer import Answer
from diptych.common.members.instance_names import role_of
from diptych.common.members.membership import State
from diptych.common.members.roles import WORKER_ROLES
from diptych.common.members.worker_load import computable_tokens, kv_occupancy
from diptych.v1.worker_pb2 import WorkerStatus

COLUMNS: Final = ("role", "pool", "workers", "ready", "running", "waiting", "backlog", "busy", "KV in use")


@dataclass(frozen=True, slots=True)
class PoolSum:
    """The workers of a role and pool."""

    role: str
    pool: str
    num_workers: int
    num_ready: int
    num_running: int
    num_waiting: int
    backlog_s: float  # seconds to compute all prompts that wait
    busy: float  # share of time in steps with prompts, mean
    kv_occupancy: float  # mean

    def row(self) -> tuple[str, ...]:
        counts = (self.num_workers, self.num_ready, self.num_running, self.num_waiting)
        shares = (f"{self.busy:.0%}", f"{self.kv_occupancy:.0%}")
        return (self.role, self.pool, *map(str, counts), f"{self.backlog_s:.1f} s", *shares)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def pool_sums(answers: Iterable[Answer]) -> list[PoolSum]:
    """Return the pools that there are, by role and name."""
    pools: dict[tuple[int, str], list[Answer]] = {}
    for answer in answers:
        if answer.member.role in WORKER_ROLES:
            pools.setdefault((answer.member.role, answer.member.pool), []).append(answer)
    return [_sum(members) for _, members in sorted(pools.items())]


def _sum(members: Sequence[Answer]) -> PoolSum:
    statuses = [answer.status for answer in members if answer.status is not None]
    loads = [status.instance.load for status in statuses]
    first = members[0].member
    return PoolSum(
        role_of(first),
        first.pool,
        len(members),
        sum(State(status.instance.state) is State.READY for status in statuses),
        sum(load.num_running for load in loads),
        sum(load.num_waiting for load in loads),
        sum(map(_backlog_s, statuses)),
        _mean([status.prefill_busy for status in statuses]),
        _mean([kv_occupancy(load) for load in loads]),
    )


def _backlog_s(status: WorkerStatus) -> float:
    speed = status.prefill_tokens_per_s
    return computable_tokens(status.instance.load) / speed if speed else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
