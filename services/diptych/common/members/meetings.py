"""Decides which workers can meet in a request: those of one model between whose roles KV moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.v1.bootstrap_pb2 import Instance


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker was started for."""

    model: str
    role: Role

    def meets(self, other: Part) -> bool:
        return self.model == other.model and self.role.exchanges_with(other.role)


def part_of(instance: Instance) -> Part | None:
    """Return the part of a worker that knows its terms, None for others."""
    if instance.role not in WORKER_ROLES or not instance.compat:
        return None
    return Part(instance.started_as or instance.model_id, WORKER_ROLES[instance.role])
