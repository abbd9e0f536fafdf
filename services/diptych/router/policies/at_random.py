"""Chooses any worker, each as likely as the others."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.roles import LegKind
from diptych.router.policies.policy import RequestView, Worker
from diptych.router.policies.shares import draw


def at_random(workers: Sequence[Worker], request: RequestView, kind: LegKind) -> Sequence[float]:
    return [draw(worker, request, kind) for worker in workers]
