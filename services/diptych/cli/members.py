"""Asks bootstrap replicas who is alive, and merges the lists of those that answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from diptych.common.errors import ConfigError
from diptych.common.members.membership import MembershipView
from diptych.common.members.replicas import replicas_of
from diptych.common.members.watch_stream import WatchStream
from diptych.common.net.rpc import open_sync_channel
from diptych.common.trust.trust import Trust
from diptych.v1.bootstrap_pb2 import Instance, WatchRequest, WatchUpdate
from diptych.v1.bootstrap_pb2_grpc import BootstrapStub

ANSWER_S: Final = 5.0


def members(replicas: Sequence[str], trust: Trust) -> list[Instance]:
    """Ask all replicas: one that has just restarted knows few. Raises `ConfigError` if none answers."""
    replicas = replicas_of(replicas)
    view: MembershipView[Instance] = MembershipView(lease_s=math.inf)
    problems = []
    with ThreadPoolExecutor(len(replicas)) as pool:
        for number, answer in enumerate(pool.map(lambda address: _ask(address, trust), replicas)):
            if isinstance(answer, str):
                problems.append(answer)
            else:
                view.apply(WatchStream(number).take(answer), now_s=0.0)
    if len(problems) == len(replicas):
        advice = "--bootstrap (or DIPTYCH_BOOTSTRAP) says where it is, `diptych up` starts a platform"
        raise ConfigError(f"can't ask bootstrap at {', nor at '.join(problems)}; {advice}")
    return list(view.instances.values())


def _ask(address: str, trust: Trust) -> WatchUpdate | str:
    """Return everything that a replica lists, or why it doesn't tell."""
    with open_sync_channel(address, trust) as channel:
        try:
            updates = BootstrapStub(channel).Watch(WatchRequest(), timeout=ANSWER_S)
            snapshot: WatchUpdate | None = next(updates, None)
            updates.cancel()
        except grpc.RpcError as error:
            return f"{address}: {error.details()}"
        return snapshot or f"{address}: it ended before it told who is listed"
