"""What trainers ask of a worker's weights, read strictly and done: see `weight_routes` for the paths."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from diptych.common.errors import InvalidRequest, NotFound, Overloaded
from diptych.common.trust.operator_route import Answer
from diptych.engine.frontend.group import WorkerGroup
from diptych.engine.frontend.service import name_of
from diptych.engine.frontend.weights.weight_changes import administer, go_on, pause, release, take_back, update_weights
from diptych.v1.admin_pb2 import AdminCommand, AnnouncedTensor, JoinGroup, UpdateWeightsRequest

MAX_FIELDS_BYTES: Final = 1 << 20
TENSORS: Final = "application/octet-stream"  # the body is a safetensors file
SHARED_MEMORY: Final = Path("/dev/shm")

Groups = Callable[[], Sequence[WorkerGroup]]
Handler = Callable[[Request], Awaitable[Answer]]


class Fields(BaseModel):
    """What a path is told. Unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    drain_s: float | None = Field(default=None, ge=0)  # for what runs to finish; the rest is handed back


class DiskFields(Fields):
    """The body of /update_weights_from_disk."""

    model_path: str  # as for --model
    weight_version: str = ""
    in_place: bool = False
    flush_cache: bool = True
    abort_all_requests: bool = False  # drain_s 0
    load_format: None = None  # as the worker was started with


class TensorFields(Fields):
    """The body of /update_weights_from_tensor, or its query."""

    files: list[str] = Field(default_factory=list)
    weight_version: str = ""
    flush_cache: bool = True


class MemoryFields(Fields):
    """The body of /release_memory_occupation and /resume_memory_occupation."""

    tags: list[str] = Field(default_factory=lambda: ["weights"])

    def check(self) -> None:
        """Raises `InvalidRequest`."""
        if self.tags != ["weights"]:
            words = "the KV pool is known to peers by its address and stays; its contents are forgotten"
            raise InvalidRequest(f'tags must be ["weights"]: {words}', param="tags")


class GroupFields(Fields):
    """The body of /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class JoinFields(GroupFields):
    """The body of /init_weights_update_group."""

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)  # of the first rank here; the trainer is rank 0
    world_size: int = Field(ge=2)
    backend: str = "gloo"


class DistributedFields(GroupFields):
    """The body of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    weight_version: str = ""
    flush_cache: bool = True


class PauseFields(Fields):
    """The body of /pause_generation."""

    mode: str = "abort"  # which hands back: routers place what ran elsewhere, or keep it until it goes on


F = TypeVar("F", bound=Fields)


def handlers(groups: Groups, drain_s: float) -> Mapping[str, Handler]:
    """Return who answers each path. `drain_s`: for what runs to finish, where the caller does not say it."""

    async def version(request: Request) -> Answer:
        return 200, {name_of(group.instance_id): group.weights_version for group in named(groups(), request)}

    async def from_disk(request: Request) -> Answer:
        fields = await _fields(request, DiskFields)
        if not fields.flush_cache:
            raise InvalidRequest(
                "flush_cache=false: KV of the old weights is never used with new ones", param="flush_cache"
            )
        within_s = 0.0 if fields.abort_all_requests else _or(fields.drain_s, drain_s)
        wanted = UpdateWeightsRequest(
            model=fields.model_path,
            version=fields.weight_version,
            in_place=fields.in_place,
            drain_ms=round(1000 * within_s),
        )
        return await _update_all(named(groups(), request), wanted)

    async def from_tensor(request: Request) -> Answer:
        chosen = named(groups(), request)
        async with _tensors(request) as fields:
            wanted = UpdateWeightsRequest(
                files=fields.files,
                version=fields.weight_version,
                more_comes=not fields.flush_cache,
                drain_ms=round(1000 * _or(fields.drain_s, drain_s)),
            )
            return await _update_all(chosen, wanted)

    async def stop(request: Request) -> Answer:
        fields, chosen = await _fields(request, PauseFields), named(groups(), request)
        if fields.mode != "abort":
            raise InvalidRequest("mode must be 'abort': requests don't outlive the KV of other weights", param="mode")
        return await _each(chosen, lambda group: pause(group, _or(fields.drain_s, 0.0)))

    async def go(request: Request) -> Answer:
        await _fields(request, Fields)
        return await _each(named(groups(), request), go_on)

    async def join(request: Request) -> Answer:
        fields, chosen = await _fields(request, JoinFields), named(groups(), request)
        if len(chosen) > 1:
            raise InvalidRequest(
                "each instance has ranks of its own in a group: say which with instance=", param="instance"
            )
        group = JoinGroup(
            name=fields.group_name,
            host=fields.master_address,
            port=fields.master_port,
            first_rank=fields.rank_offset,
            world_size=fields.world_size,
            backend=fields.backend,
        )
        return await _each(chosen, lambda each: administer(each, AdminCommand(join_group=group)))

    async def from_distributed(request: Request) -> Answer:
        fields = await _fields(request, DistributedFields)
        wanted = UpdateWeightsRequest(
            group=fields.group_name,
            tensors=_announced(fields),
            version=fields.weight_version,
            more_comes=not fields.flush_cache,
            drain_ms=round(1000 * _or(fields.drain_s, drain_s)),
        )
        return await _update_all(named(groups(), request), wanted)

    async def leave(request: Request) -> Answer:
        fields = await _fields(request, GroupFields)
        command = AdminCommand(leave_group=fields.group_name)
        return await _each(named(groups(), request), lambda each: administer(each, command))

    async def free(request: Request) -> Answer:
        fields, chosen = await _fields(request, MemoryFields), named(groups(), request)
        fields.check()
        return await _each(chosen, lambda group: release(group, _or(fields.drain_s, drain_s)))

    async def resume(request: Request) -> Answer:
        (await _fields(request, MemoryFields)).check()
        return await _each(named(groups(), request), take_back)

    return {
        "/weight_version": version,
        "/release_memory_occupation": free,
        "/resume_memory_occupation": resume,
        "/init_weights_update_group": join,
        "/update_weights_from_distributed": from_distributed,
        "/destroy_weights_update_group": leave,
        "/update_weights_from_disk": from_disk,
        "/update_weights_from_tensor": from_tensor,
        "/pause_generation": stop,
        "/continue_generation": go,
    }


def _announced(fields: DistributedFields) -> list[AnnouncedTensor]:
    if not len(fields.names) == len(fields.dtypes) == len(fields.shapes) > 0:
        raise InvalidRequest("names, dtypes and shapes must be lists of one length, and not empty", param="names")
    if any(size < 0 for shape in fields.shapes for size in shape):
        raise InvalidRequest("no size of a tensor is negative", param="shapes")
    each = zip(fields.names, fields.dtypes, fields.shapes, strict=True)
    return [AnnouncedTensor(name=name, dtype=dtype.removeprefix("torch."), shape=shape) for name, dtype, shape in each]


async def _update_all(groups: Sequence[WorkerGroup], wanted: UpdateWeightsRequest) -> Answer:
    done = await _to_the_end([update_weights(group, wanted) for group in groups])
    lacking = [name for name in done[0].lacking]
    message = f"{len(lacking)} tensors are lacking" if lacking else "more is to come" if wanted.more_comes else "served"
    versions = {name_of(group.instance_id): each.version for group, each in zip(groups, done, strict=True)}
    return 200, {"success": not lacking, "message": message, "lacking": lacking, "weight_versions": versions}


async def _each(groups: Sequence[WorkerGroup], act: Callable[[WorkerGroup], Awaitable[None]]) -> Answer:
    await _to_the_end([act(group) for group in groups])
    return 200, {"success": True, "message": "done"}


async def _to_the_end(works: Sequence[Awaitable[Any]]) -> list[Any]:
    """Do all, whether or not the caller waits; raise the first error when all have ended."""
    gathered = asyncio.gather(*works, return_exceptions=True)
    done = await asyncio.shield(gathered)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return done


def named(groups: Sequence[WorkerGroup], request: Request) -> Sequence[WorkerGroup]:
    """Return the groups that are meant. Raises `NotFound`."""
    name = request.query_params.get("instance")
    chosen = [group for group in groups if name in (None, name_of(group.instance_id))]
    if not chosen:
        raise NotFound(f"no instance {name} here; there is: {', '.join(name_of(g.instance_id) for g in groups)}")
    return chosen


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


async def _fields(request: Request, kind: type[F]) -> F:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FIELDS_BYTES:
            raise InvalidRequest(f"the body is longer than {MAX_FIELDS_BYTES} bytes")
    try:
        return kind.model_validate(orjson.loads(body or b"{}"))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    except ValidationError as error:
        raise _wrong(error) from None


@asynccontextmanager
async def _tensors(request: Request) -> AsyncIterator[TensorFields]:
    """Yield the fields; a body of tensors lies in a file of shared memory meanwhile."""
    if request.headers.get("content-type", "").partition(";")[0] != TENSORS:
        yield await _fields(request, TensorFields)
        return
    fields = _of_query(request.query_params)
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    handle, name = tempfile.mkstemp(prefix="diptych-tensors-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            async for part in request.stream():
                file.write(part)
        yield fields.model_copy(update={"files": [name]})
    except OSError as error:
        raise Overloaded(
            f"the tensors have no room here: {error}; send fewer at once, with flush_cache=false"
        ) from None
    except ClientDisconnect:
        raise InvalidRequest("the body ended before its end") from None
    finally:
        os.unlink(name)


def _of_query(query: Mapping[str, str]) -> TensorFields:
    given = {name: value for name, value in query.items() if name != "instance"}
    try:
        return TensorFields.model_validate(given, strict=False)
    except ValidationError as error:
        raise _wrong(error) from None


def _wrong(error: ValidationError) -> InvalidRequest:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    return InvalidRequest(f"{name}: {first['msg']}", param=name)
