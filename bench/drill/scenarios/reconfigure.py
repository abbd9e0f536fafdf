"""What an operator changes without a restart: the token that all share is replaced, and a worker serves other roles."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final

import grpc

from diptych.common.net.rpc import open_channel
from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import Trust
from diptych.v1 import bootstrap_pb2
from diptych.v1.admin_pb2 import SetRoleRequest
from diptych.v1.admin_pb2_grpc import WorkerAdminStub
from diptych.v1.worker_pb2 import StatusRequest
from diptych.v1.worker_pb2_grpc import WorkerStub
from drill.cluster import ANSWER_TIMEOUT_S, Worker
from drill.drill import Drill, Scenario

CHANGED_S: Final = 180.0
NOTICED_S: Final = 0.2  # by everybody that a file has another time stamp
DRAIN_MS: Final = 1000  # what runs longer is handed back
ROLES: Final = (bootstrap_pb2.ROLE_UNIFIED, bootstrap_pb2.ROLE_PREFILL, bootstrap_pb2.ROLE_DECODE)


async def run(drill: Drill) -> None:
    await _replace_token(drill)
    worker = drill.rng.choice(drill.cluster.of_role("decode"))
    took = [await _set_role(drill, worker, role) for role in ROLES]
    drill.counts["slowest change of a role, s"] = round(max(took), 2)


async def _replace_token(drill: Drill) -> None:
    """The new one is accepted by all before anybody sends it; in the end the old one is not."""
    file, new = drill.cluster.tokens, secrets.token_hex(32)
    old = file.read_text().strip()
    for lines in ((old, new), (new, old), (new,)):
        file.write_text("\n".join(lines))
        await asyncio.sleep(NOTICED_S)
        await drill.traffic.next_tokens()
    for worker in drill.cluster.workers:
        code = await _ask_status(worker, Trust(Tokens.of_variable(old), None))
        drill.complain_unless(code is grpc.StatusCode.UNAUTHENTICATED, f"{worker} took the former token: {code}")


async def _ask_status(worker: Worker, trust: Trust) -> grpc.StatusCode:
    async with open_channel(worker.address, trust) as channel:
        try:
            await WorkerStub(channel).GetStatus(StatusRequest(), timeout=ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def _set_role(drill: Drill, worker: Worker, role: bootstrap_pb2.Role) -> float:
    began_s = time.monotonic()
    async with open_channel(worker.address, drill.cluster.trust) as channel:
        await WorkerAdminStub(channel).SetRole(SetRoleRequest(role=role, drain_ms=DRAIN_MS), timeout=CHANGED_S)
    took_s = time.monotonic() - began_s
    await drill.cluster.wait_until_well()
    await drill.traffic.next_tokens()
    return took_s


SCENARIO = Scenario("reconfigure", run)
