"""Formats what `diptych status` prints: tables of pools and members with remarks, or JSON for programs. Pure.

Pools are summed up over the workers that answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from diptych.cli.requests.asking import Answer
from diptych.common.members.instances import (
    computable_tokens,
    kv_occupancy,
    name_of,
    prompt_budget,
    ranks_of,
    role_of,
    state_of,
)
from diptych.common.members.pods import Pod
from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, LegKind, part_of
from diptych.common.members.terms import mismatch, terms_of
from diptych.v1.bootstrap_pb2 import GroupNode, Instance, WorkerLoad
from diptych.v1.worker_pb2 import LINK_STATE_UP, Drafting, Drain, WorkerStatus

COLUMNS: Final = (
    *("role", "pool", "pod", "instance", "state", "address", "version"),
    *("running", "waiting", "free pages", "credit", "prompts", "links", "guesses"),
)
MEMBER_FIELDS: Final = ("address", "dp_rank", "version", "pool", "pod", "model_id", "not_ready")
NODE_COLUMNS: Final = ("group", "node", "host", "pod", "ranks", "epoch")
POOL_COLUMNS: Final = ("role", "pool", "workers", "ready", "running", "waiting", "backlog", "busy", "KV in use")


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line a row under the names of the columns; those that are empty in every row are left out."""
    listed = [tuple(row) for row in rows]
    kept = [number for number in range(len(columns)) if any(row[number] for row in listed)]
    shown = [[row[number] for number in kept] for row in (tuple(columns), *listed)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Workers that would pair by their roles, and can't."""

    reason: str
    pairs: tuple[tuple[Instance, Instance], ...]


def mismatches(members: Iterable[Instance]) -> list[Mismatch]:
    """Return what keeps workers apart, by reason."""
    workers = [(part, each) for each in members if (part := part_of(each)) is not None]
    found: dict[str, list[tuple[Instance, Instance]]] = {}
    for (part, one), (others_part, other) in itertools.combinations(workers, 2):
        if part.meets(others_part):
            reason = mismatch(terms_of(one.terms), terms_of(other.terms))
            found.setdefault(reason, []).append((one, other))
    return [Mismatch(reason, tuple(pairs)) for reason, pairs in sorted(found.items()) if reason]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found at one time."""

    answers: Sequence[Answer]
    unlike: Sequence[Mismatch] = ()
    strangers: Sequence[Pod] = ()  # that did not register
    problem: str = ""  # why bootstrap did not say who there is


def as_text(report: Report) -> str:
    """Return the tables, and below them what needs words."""
    answers, problem = report.answers, report.problem
    pools = text_table(POOL_COLUMNS, [pool.row() for pool in pool_sums(answers)])
    members = text_table(COLUMNS, map(_row, answers)) if answers else ["no member is registered"]
    nodes = text_table(NODE_COLUMNS, [row for answer in answers for row in _node_rows(answer.member)])
    remarks = [f"{name_of(answer.member)}: {words}" for answer in answers if (words := _remark(answer))]
    remarks += [f"{_pairs(each)} can't pair: {each.reason}" for each in report.unlike]
    remarks += [f"pod {pod.name} at {pod.address} is not registered" for pod in report.strangers]
    tables = (pools[1:] and pools, members, nodes[1:] and nodes)
    parts = (part for part in (problem and [problem], *tables, remarks) if part)
    return "\n\n".join("\n".join(part) for part in parts)


def as_json(report: Report) -> dict[str, Any]:
    return {
        "problem": report.problem,
        "pools": [asdict(pool) for pool in pool_sums(report.answers)],
        "unregistered_pods": [pod.name for pod in report.strangers],
        "members": [_member_json(answer) for answer in report.answers],
        "mismatches": [
            {"reason": each.reason, "pairs": [[_id(one), _id(other)] for one, other in each.pairs]}
            for each in report.unlike
        ],
    }


def _row(answer: Answer) -> tuple[str, ...]:
    member = answer.member
    rank = f"#{member.dp_rank}" if member.dp_rank else ""
    names = (role_of(member), member.pool, member.pod, _id(member))
    head = (*names, _state(answer), f"{member.address}{rank}", member.version)
    if answer.status is None:
        return (*head, "-", "-", "-", "-", "", "-", "")
    load = member.load
    most = answer.status.max_requests  # 0: it has not loaded, or is no worker
    running = f"{load.num_running}/{most}" if most else str(load.num_running)
    counts = (running, str(load.num_waiting), f"{load.free_pages}/{load.total_pages}")
    role = WORKER_ROLES.get(member.role)
    credit = str(load.grantable_pages) if role and role.serves(LegKind.DECODE) else "-"
    return (*head, *counts, credit, _prompts(load), _links(answer.status), _guesses(answer.status))


def _node_rows(member: Instance) -> list[tuple[str, ...]]:
    """Return a row for each node of a group over several; a worker of one node has none."""
    group = _id(member)
    return [(group, str(node.node), node.host, node.pod, ranks_of(node), f"{node.epoch:016x}") for node in member.nodes]


def _prompts(load: WorkerLoad) -> str:
    """Say how many tokens of prompts a step may have; nothing where that is any number."""
    budget = prompt_budget(load)
    return "" if budget == math.inf else str(budget)


def _links(status: WorkerStatus) -> str:
    """Say how many links are up, of all, and over which lanes."""
    up = [link for link in status.links if link.state == LINK_STATE_UP]
    lanes = ", ".join(sorted({link.lanes for link in up}))
    return f"{len(up)}/{len(status.links)} {lanes}".rstrip()


def _guesses(status: WorkerStatus) -> str:
    """Say how many guesses came true, of those verified, and the time that they saved; nothing where nobody guesses."""
    if not status.HasField("drafting"):
        return ""
    drafting = status.drafting
    return f"{_accepted(drafting)}/{_verified(drafting)} saved {round(drafting.saved_s, 1) + 0.0:.1f} s"


def _verified(drafting: Drafting) -> int:
    return sum(sum(each.verified) for each in drafting.sources)


def _accepted(drafting: Drafting) -> int:
    return sum(sum(each.accepted) for each in drafting.sources)


def _state(answer: Answer) -> str:
    if answer.drain is not None and answer.drain.phase == Drain.PHASE_EMPTY:
        return "empty"
    if answer.member.paused:
        return "paused"
    return state_of(answer.member)


def _remark(answer: Answer) -> str:
    if answer.problem:
        return f"does not answer: {answer.problem}"
    if answer.drain is not None:
        return drain_words(answer.drain)
    return f"not ready: {answer.member.not_ready}" if answer.member.not_ready else ""


def _pairs(unlike: Mismatch) -> str:
    one, other = unlike.pairs[0]
    others = f" (and {len(unlike.pairs) - 1} more pairs)" if len(unlike.pairs) > 1 else ""
    return f"{name_of(one)} and {name_of(other)}{others}"


def _member_json(answer: Answer) -> dict[str, Any]:
    member = answer.member
    record: dict[str, Any] = {
        "instance_id": _id(member),
        "role": role_of(member),
        "state": _state(answer),
        **{name: getattr(member, name) for name in MEMBER_FIELDS},
        "problem": answer.problem,
    }
    if member.nodes:
        record["nodes"] = [_node_json(node) for node in member.nodes]
    if answer.status is not None:
        names = ("num_running", "num_waiting", "free_pages", "total_pages", "grantable_pages", "waiting_tokens")
        record["max_requests"] = answer.status.max_requests
        record["max_step_tokens"] = answer.status.max_step_tokens
        record["load"] = {name: getattr(member.load, name) for name in names}
        budget = prompt_budget(member.load)
        record["load"]["prompt_budget"] = None if budget == math.inf else budget
        record["links_up"] = sum(link.state == LINK_STATE_UP for link in answer.status.links)
        record["lanes"] = sorted({link.lanes for link in answer.status.links if link.state == LINK_STATE_UP})
        if answer.status.HasField("drafting"):
            record["drafting"] = _drafting_json(answer.status.drafting)
    if (drain := answer.drain) is not None:
        record["drain"] = {name: getattr(drain, name) for name in ("requests_left", "oldest_s", "deadline_s")}
    return record


def _node_json(node: GroupNode) -> dict[str, Any]:
    numbers = {name: getattr(node, name) for name in ("node", "host", "pod", "first_rank", "num_ranks")}
    return {**numbers, "epoch": f"{node.epoch:016x}"}


def _drafting_json(drafting: Drafting) -> dict[str, Any]:
    return {
        "sources": {
            each.source: {"verified": list(each.verified), "accepted": list(each.accepted)} for each in drafting.sources
        },
        **{name: getattr(drafting, name) for name in ("asked", "asking_s", "saved_s", "held_bytes")},
    }


def _id(member: Instance) -> str:
    return f"{member.instance_id:016x}"


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


def drain_words(drain: Drain | None) -> str:
    """Say how far a drain is."""
    if drain is None:
        return "serving"
    if drain.phase == Drain.PHASE_EMPTY:
        return "empty"
    if not drain.requests_left:
        return "draining, waits for pages that are on their way"
    left = f"{drain.requests_left} request{'s' if drain.requests_left > 1 else ''} left"
    end = f"handed back in {drain.deadline_s:.0f} s" if drain.deadline_s else "being handed back"
    return f"draining, {left}, the oldest since {drain.oldest_s:.0f} s, {end}"
