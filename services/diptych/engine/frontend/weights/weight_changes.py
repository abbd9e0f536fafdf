"""How a scheduler group comes to serve other weights, and what keeps it from serving meanwhile.

*Beside*: load, take nothing new, let what runs finish, switch, serve again. The old weights serve until the switch, and
after it if anything fails. *In place* needs no room for two sets: what can be checked is checked first; then the group
takes nothing new, ends what runs, and its weights are replaced part by part. If that fails on its way, the model that
was served is loaded again; if that fails, too, or what came is not all, the group says why it serves nothing until
others come. A group may also be paused, as long as a trainer likes: updates end then, and nothing is served.

Nothing mixes: no leg is accepted in between, what still runs when the time is up is handed back (routers place it
elsewhere), and a leg that a router started for the old weights is refused after the switch by its `compat`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from diptych.common.errors import Conflict, DiptychError, InvalidRequest, Unavailable
from diptych.engine.frontend.group import WorkerGroup
from diptych.v1.admin_pb2 import (
    AdminCommand,
    CloseWeights,
    DropWeights,
    PrepareWeights,
    ReleaseWeights,
    SwitchWeights,
    SwitchWeightsResult,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WeightsChange,
)

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.05
NUM_TRIES: Final = 200
WEIGHTS: Final = "weights"  # what holds a group: they are incomplete
PAUSE: Final = "pause"  # somebody said so


async def update_weights(group: WorkerGroup, wanted: UpdateWeightsRequest) -> UpdateWeightsResponse:
    """Serve other weights. Raises a `DiptychError` that says what is served then."""
    _check(wanted)
    if group.updating.locked():
        raise Unavailable("another update is under way")
    async with group.updating:
        if wanted.in_place or not wanted.model:
            result = await _in_place(group, wanted)
        else:
            result = await _beside(group, wanted)
    return UpdateWeightsResponse(
        model_id=result.model_id,
        previous_model_id=result.previous_model_id,
        previous_model=result.previous_model,
        version=result.version,
        lacking=result.lacking,
    )


async def pause(group: WorkerGroup, drain_s: float) -> None:
    """Serve nothing until `go_on`; what has not finished in time is handed back. Raises `Unavailable`."""
    async with group.updating:
        group.departure.hold(PAUSE, "generation is paused: continue it")
        await _vacate(group, "generation is paused", drain_s)


async def go_on(group: WorkerGroup) -> None:
    """End a pause. Raises `Conflict` while weights are incomplete."""
    async with group.updating:
        group.departure.let_go(PAUSE)
        group.departure.resume()
        if WEIGHTS in group.departure.holds:
            raise Conflict(f"nothing can be served yet: {group.departure.holds[WEIGHTS]}")


async def release(group: WorkerGroup, drain_s: float) -> None:
    """Free the memory of the weights, and serve nothing until `take_back` or an update in place."""
    async with group.updating:
        try:
            if WEIGHTS not in group.departure.holds:
                await _close(group, drain_s)
            await group.queries.administer(AdminCommand(release_weights=ReleaseWeights()))
            group.departure.hold(WEIGHTS, "the memory of its weights was released: resume it")
        finally:
            group.departure.resume()


async def take_back(group: WorkerGroup) -> None:
    """Load again what was served before the weights were released. Raises `Conflict`."""
    async with group.updating:
        if WEIGHTS not in group.departure.holds:
            raise Conflict("nothing was released")
        if not group.model_before:
            raise Conflict("its weights came as tensors: give them again, by an update")
        try:
            await _replaced(group, WeightsChange(model=group.model_before, version=group.weights_version))
        finally:
            group.departure.resume()


async def administer(group: WorkerGroup, command: AdminCommand) -> None:
    """Have a command executed that changes nothing that is served. Raises its refusal."""
    own = AdminCommand()
    own.CopyFrom(command)
    await group.queries.administer(own)


async def _beside(group: WorkerGroup, wanted: UpdateWeightsRequest) -> SwitchWeightsResult:
    if WEIGHTS in group.departure.holds:
        raise Conflict(f"{group.departure.holds[WEIGHTS]}: update them in place")
    prepared = PrepareWeights(model=wanted.model, version=wanted.version)
    await group.queries.administer(AdminCommand(prepare_weights=prepared))
    try:
        await group.departure.vacate("its weights are being replaced", wanted.drain_ms / 1000)
        result = await _when_idle(group, AdminCommand(switch_weights=SwitchWeights()))
        group.rename(result)
    except DiptychError as error:
        logger.error("the old weights stay: %s", error)
        await group.queries.administer(AdminCommand(drop_weights=DropWeights()))
        raise
    finally:
        group.departure.resume()
    return result


async def _in_place(group: WorkerGroup, wanted: UpdateWeightsRequest) -> SwitchWeightsResult:
    change = WeightsChange(
        model=wanted.model,
        files=wanted.files,
        version=wanted.version,
        more_comes=wanted.more_comes,
        group=wanted.group,
        tensors=wanted.tensors,
    )
    await group.queries.administer(AdminCommand(check_weights=change))
    try:
        if WEIGHTS not in group.departure.holds:
            await _close(group, wanted.drain_ms / 1000)
        return await _replaced(group, change)
    finally:
        group.departure.resume()


async def _close(group: WorkerGroup, drain_s: float) -> None:
    await group.departure.vacate("its weights are being replaced", drain_s)
    closed = await _when_idle(group, AdminCommand(close_weights=CloseWeights()))
    group.departure.hold(WEIGHTS, "its weights are being replaced")
    group.model_before = closed.previous_model


async def _replaced(group: WorkerGroup, change: WeightsChange) -> SwitchWeightsResult:
    try:
        result = (await group.queries.administer(AdminCommand(replace_weights=change))).switch_weights
    except DiptychError as error:
        raise await _restored(group, error) from error
    if result.lacking or change.more_comes:
        group.departure.hold(WEIGHTS, _incomplete(result.lacking))
        return result
    group.departure.let_go(WEIGHTS)
    group.rename(result)
    return result


def _incomplete(lacking: Sequence[str]) -> str:
    return f"{len(lacking)} tensors are lacking, as {lacking[0]}" if lacking else "more of its weights is to come"


async def _restored(group: WorkerGroup, error: DiptychError) -> DiptychError:
    """Serve again what was served before an update that failed; return what the caller is to be told."""
    lost = "its weights are neither the old ones nor the new ones: update them in place"
    group.departure.hold(WEIGHTS, lost)
    if not group.model_before:
        return Unavailable(f"{error}; now {lost}")
    try:
        old = WeightsChange(model=group.model_before)
        result = (await group.queries.administer(AdminCommand(replace_weights=old))).switch_weights
    except DiptychError as second:
        logger.error("%s: %s", lost, second)
        return Unavailable(f"{error}; {group.model_before} can't be loaded again, either ({second}): now {lost}")
    group.departure.let_go(WEIGHTS)
    group.rename(result)
    return InvalidRequest(f"{error}; {group.model_before} is served again")


async def _when_idle(group: WorkerGroup, command: AdminCommand) -> SwitchWeightsResult:
    """Have it done as soon as no request holds KV: an aborted one may still be in a transfer."""
    for _ in range(NUM_TRIES):
        try:
            return (await group.queries.administer(command)).switch_weights
        except Unavailable:
            await asyncio.sleep(RETRY_S)
    raise Unavailable(f"aborted requests still hold KV after {NUM_TRIES * RETRY_S:g} s")


async def _vacate(group: WorkerGroup, reason: str, drain_s: float) -> None:
    try:
        await group.departure.vacate(reason, drain_s)
    finally:
        group.departure.resume()


def _check(wanted: UpdateWeightsRequest) -> None:
    """Raises `InvalidRequest`."""
    if sum(map(bool, (wanted.model, wanted.files, wanted.group))) != 1:
        raise InvalidRequest("give one of a model, files with tensors, or the group of a trainer", param="model")
    if bool(wanted.group) != bool(wanted.tensors):
        raise InvalidRequest("say which tensors the trainer of the group broadcasts, in their order", param="tensors")
    if wanted.more_comes and wanted.model:
        raise InvalidRequest("a model is all there is: more_comes is for files with tensors", param="more_comes")
