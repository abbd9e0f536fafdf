"""Starts and ends the schedulers of an embedded engine: groups for whole requests, or linked ones for each half."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Final

from diptych.common.errors import ConfigError
from diptych.common.members.roles import Role
from diptych.embedded.group import Group
from diptych.engine.frontend.scheduler_client import start_scheduler
from diptych.engine.options.config import EngineOptions, SchedulerConfig
from diptych.engine.values.transfer_rules import TransferRules
from diptych.v1 import bootstrap_pb2, engine_pb2

LINK_TIMEOUT_S: Final = 60.0  # for every link to pass its test, once the models are loaded


def roles_of(dp: int, prefill: int, decode: int) -> Sequence[Role]:
    """Return the roles of an engine's groups. Raises `ConfigError`."""
    if not prefill and not decode:
        return [Role.LOCAL] * dp
    if min(prefill, decode) < 1:
        raise ConfigError(f"an engine has prefill and decode groups, or neither: not {prefill} and {decode}")
    if dp > 1:
        raise ConfigError("dp is for groups that serve whole requests: give the numbers prefill and decode only")
    return [Role.PREFILL] * prefill + [Role.DECODE] * decode


@contextlib.asynccontextmanager
async def launched(options: EngineOptions, roles: Sequence[Role]) -> AsyncIterator[tuple[Sequence[Group], int]]:
    """Yield groups that serve, and the tokens that a request may have. Raises `SchedulerDied`, `ConfigError`."""
    groups: list[Group] = []
    running: list[asyncio.Task[None]] = []
    try:
        for number, role in enumerate(roles):
            groups.append(await _start(options.of_group(number), role))
        readies = await asyncio.gather(*(group.ready() for group in groups))
        running += [asyncio.create_task(group.run()) for group in groups]
        await _link(groups, readies)
        yield groups, min(ready.context_len for ready in readies)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*(group.stop() for group in groups))


async def _start(options: EngineOptions, role: Role) -> Group:
    """Start a scheduler. It lets a request wait for memory as long as it takes: nobody else would compute it."""
    config = SchedulerConfig(
        component="engine" if role is Role.LOCAL else role.value,
        log_format="auto",
        log_level="warning",
        instance_id=secrets.randbits(64) or 1,
        transports="auto",
        transfer=TransferRules(),
        engine=options,
        role=role.value,
        retracted_s=math.inf,
    )
    return Group(await start_scheduler(config), config.instance_id, role, options.page_size)


async def _link(groups: Sequence[Group], readies: Sequence[engine_pb2.SchedulerReady]) -> None:
    """Link each group to those that it exchanges KV with."""
    records = [
        (group.role, bootstrap_pb2.Instance(instance_id=group.instance_id, transfer=ready.transfer))
        for group, ready in zip(groups, readies, strict=True)
    ]
    peers = [[record for role, record in records if group.role.exchanges_with(role)] for group in groups]
    try:
        async with asyncio.timeout(LINK_TIMEOUT_S):
            await asyncio.gather(*(group.link(each) for group, each in zip(groups, peers, strict=True) if each))
    except TimeoutError:
        problems = "; ".join({group.problem for group in groups if group.problem})
        raise ConfigError(f"prefill and decode were not linked within {LINK_TIMEOUT_S:g} s: {problems}") from None
