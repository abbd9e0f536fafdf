"""Replaces the weights of a running worker: load, take nothing new, let what runs finish, switch, serve again.

The old weights serve until the switch, and after it if anything fails. Nothing mixes: no leg is accepted in between,
what still runs when the time is up is handed back (routers place it elsewhere), and a leg that a router started for the
old weights is refused after the switch by its `compat`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from diptych.common.errors import DiptychError, Unavailable
from diptych.engine.frontend.group import WorkerGroup
from diptych.v1.admin_pb2 import (
    AdminCommand,
    DropWeights,
    PrepareWeights,
    SwitchWeights,
    SwitchWeightsResult,
    UpdateWeightsResponse,
)

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.05
NUM_TRIES: Final = 200


async def update_weights(group: WorkerGroup, model: str, drain_s: float) -> UpdateWeightsResponse:
    """Serve the weights of `model`. Raises a `DiptychError`; then the old ones are served."""
    if group.updating.locked():
        raise Unavailable("another update is under way")
    async with group.updating:
        await group.administer(AdminCommand(prepare_weights=PrepareWeights(model=model)))
        result = await _replace(group, drain_s)
    return UpdateWeightsResponse(
        model_id=result.model_id, previous_model_id=result.previous_model_id, previous_model=result.previous_model
    )


async def _replace(group: WorkerGroup, drain_s: float) -> SwitchWeightsResult:
    try:
        await group.departure.vacate("its weights are being replaced", drain_s)
        result = await _switch(group)
        group.rename(result.model_id, result.terms)
    except DiptychError as error:
        logger.error("the old weights stay: %s", error)
        await group.administer(AdminCommand(drop_weights=DropWeights()))
        raise
    finally:
        group.departure.resume()
    return result


async def _switch(group: WorkerGroup) -> SwitchWeightsResult:
    """Switch as soon as no request holds KV: an aborted one may still be in a transfer."""
    for _ in range(NUM_TRIES):
        try:
            return (await group.administer(AdminCommand(switch_weights=SwitchWeights()))).switch_weights
        except Unavailable:
            await asyncio.sleep(RETRY_S)
    raise Unavailable(f"aborted requests still hold KV after {NUM_TRIES * RETRY_S:g} s")
