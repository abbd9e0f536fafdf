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

    def drain_ms(self, drain_s: float) -> int:
        """Return for how long what runs may finish; `drain_s`: where the caller does not say it."""
        return round(1000 * (drain_s if self.drain_s is None else self.drain_s))


class DiskFields(Fields):
    """The body of /update_weights_from_disk."""

    model_path: str  # as for --model
    weight_version: str = ""
    in_place: bool = False
    flush_cache: bool = True
    abort_all_requests: bool = False  # drain_s 0
    load_format: None = None  # as the worker was started with

    def wanted(self, drain_s: float) -> UpdateWeightsRequest:
        """Raises `InvalidRequest`."""
        if not self.flush_cache:
            words = "KV of the old weights is never used with new ones"
            raise InvalidRequest(f"flush_cache=false: {words}", param="flush_cache")
        drain_ms = 0 if self.abort_all_requests else self.drain_ms(drain_s)
        version, in_place = self.weight_version, self.in_place
        return UpdateWeightsRequest(model=self.model_path, version=version, in_place=in_place, drain_ms=drain_ms)


class TensorFields(Fields):
    """The body of /update_weights_from_tensor, or its query."""

    files: list[str] = Field(default_factory=list)
    weight_version: str = ""
    flush_cache: bool = True

    def wanted(self, drain_s: float) -> UpdateWeightsRequest:
        more_comes, version = not self.flush_cache, self.weight_version
        drain_ms = self.drain_ms(drain_s)
        return UpdateWeightsRequest(files=self.files, version=version, more_comes=more_comes, drain_ms=drain_ms)


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

    def wanted(self) -> JoinGroup:
        return JoinGroup(
            name=self.group_name,
            host=self.master_address,
            port=self.master_port,
            first_rank=self.rank_offset,
            world_size=self.world_size,
            backend=self.backend,
        )


class DistributedFields(GroupFields):
    """The body of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    weight_version: str = ""
    flush_cache: bool = True

    def wanted(self, drain_s: float) -> UpdateWeightsRequest:
        """Raises `InvalidRequest`."""
        return UpdateWeightsRequest(
            group=self.group_name,
            tensors=self._announced(),
            version=self.weight_version,
            more_comes=not self.flush_cache,
            drain_ms=self.drain_ms(drain_s),
        )

    def _announced(self) -> list[AnnouncedTensor]:
        if not len(self.names) == len(self.dtypes) == len(self.shapes) > 0:
            raise InvalidRequest("names, dtypes and shapes must be lists of one length, and not empty", param="names")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise InvalidRequest("no size of a tensor is negative", param="shapes")
        each = zip(self.names, (dtype.removeprefix("torch.") for dtype in self.dtypes), self.shapes, strict=True)
        return [AnnouncedTensor(name=name, dtype=dtype, shape=shape) for name, dtype, shape in each]


class PauseFields(Fields):
    """The body of /pause_generation."""

    mode: str = "abort"  # which hands back: routers place what ran elsewhere, or keep it until it goes on

    def check(self) -> None:
        """Raises `InvalidRequest`."""
        if self.mode != "abort":
            raise InvalidRequest("mode must be 'abort': requests don't outlive the KV of other weights", param="mode")


F = TypeVar("F", bound=Fields)


class WeightRequests:
    """Who answers each path."""

    def __init__(self, groups: Groups, drain_s: float) -> None:
        """`drain_s`: for what runs to finish, where the caller does not say it."""
        self._groups = groups
        self._drain_s = drain_s

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "/weight_version": self._version,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._from_distributed,
            "/destroy_weights_update_group": self._leave,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
        }

    async def _version(self, request: Request) -> Answer:
        return 200, {name_of(group.instance_id): group.weights_version for group in self._named(request)}

    async def _from_disk(self, request: Request) -> Answer:
        wanted = (await _fields(request, DiskFields)).wanted(self._drain_s)
        return await _update_all(self._named(request), wanted)

    async def _from_tensor(self, request: Request) -> Answer:
        chosen = self._named(request)
        async with _tensors(request) as fields:
            return await _update_all(chosen, fields.wanted(self._drain_s))

    async def _from_distributed(self, request: Request) -> Answer:
        wanted = (await _fields(request, DistributedFields)).wanted(self._drain_s)
        return await _update_all(self._named(request), wanted)

    async def _pause(self, request: Request) -> Answer:
        fields, chosen = await _fields(request, PauseFields), self._named(request)
        fields.check()
        return await _each(chosen, lambda group: pause(group, fields.drain_s or 0.0))

    async def _continue(self, request: Request) -> Answer:
        await _fields(request, Fields)
        return await _each(self._named(request), go_on)

    async def _join(self, request: Request) -> Answer:
        fields, chosen = await _fields(request, JoinFields), self._named(request)
        if len(chosen) > 1:
            words = "each instance has ranks of its own in a group: say which with instance="
            raise InvalidRequest(words, param="instance")
        command = AdminCommand(join_group=fields.wanted())
        return await _each(chosen, lambda group: administer(group, command))

    async def _leave(self, request: Request) -> Answer:
        fields = await _fields(request, GroupFields)
        command = AdminCommand(leave_group=fields.group_name)
        return await _each(self._named(request), lambda group: administer(group, command))

    async def _release(self, request: Request) -> Answer:
        fields, chosen = await _fields(request, MemoryFields), self._named(request)
        fields.check()
        return await _each(chosen, lambda group: release(group, fields.drain_ms(self._drain_s) / 1000))

    async def _resume(self, request: Request) -> Answer:
        (await _fields(request, MemoryFields)).check()
        return await _each(self._named(request), take_back)

    def _named(self, request: Request) -> Sequence[WorkerGroup]:
        return named(self._groups(), request)


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
