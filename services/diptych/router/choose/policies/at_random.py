"""Chooses any worker, each as likely as the others."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.members.roles import LegKind
from diptych.router.choose.policies.policy import RequestView, Worker
from diptych.router.choose.policies.shares import draw


def at_random(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    return [draw(worker, request, kind) for worker in workers]
