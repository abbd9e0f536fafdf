"""Decides in which order workers get new weights: pair by pair, so that the other pairs serve meanwhile.

A unified worker serves alone if need be, so it is updated alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from diptych.common.errors import ConfigError
from diptych.common.members.roles import WORKER_ROLES
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance


def workers_of(instances: Iterable[Instance], started_as: str) -> list[Instance]:
    """Return the ready workers that were started with a model; empty: with the only one there is."""
    ready = [i for i in instances if i.role in WORKER_ROLES and i.state == bootstrap_pb2.INSTANCE_STATE_READY]
    names = sorted({instance.started_as for instance in ready}) or ["none"]
    if not started_as and len(names) > 1:
        raise ConfigError(f"workers were started with {' and '.join(names)}: say which with --started-as")
    workers = [instance for instance in ready if instance.started_as == (started_as or names[0])]
    if not workers:
        raise ConfigError(f"no worker is ready that was started with {started_as!r}; there are: {', '.join(names)}")
    return workers


def rounds(workers: Sequence[Instance]) -> list[list[Instance]]:
    """Return who is updated together: a prefill and a decode worker, as long as there are both; then one by one."""
    prefills = [worker for worker in workers if worker.role == bootstrap_pb2.ROLE_PREFILL]
    decodes = [worker for worker in workers if worker.role == bootstrap_pb2.ROLE_DECODE]
    unified = [worker for worker in workers if worker.role == bootstrap_pb2.ROLE_UNIFIED]
    pairs = [[worker for worker in pair if worker is not None] for pair in zip_longest(prefills, decodes)]
    return [*pairs, *([worker] for worker in unified)]
