"""/v1/files, as OpenAI's clients use them: inputs of batches, and what batches wrote."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from diptych.common.errors import Conflict, DiptychError, InvalidRequest, NotFound, Overloaded, Unavailable
from diptych.router.batches.batches import Batches
from diptych.router.batches.files import FileFacts, is_id, new_id
from diptych.router.http.exchange.answers import HEADER, json_response, refusal, request_id_of
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.openai.upload import UploadForm, UploadLimits, file_of

INPUT: Final = "batch"  # the only purpose of what is uploaded
MAX_LISTED: Final = 10_000
MAX_BATCHES_LISTED: Final = 100
BATCHES_LISTED: Final = 20  # unless said, as OpenAI's API has it
LIMIT: Final = re.compile(r"[0-9]{1,6}")
MAX_UPLOADS: Final = 8  # of a tenant at once, in each process


class File(TypedDict):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    """Some files, the newest first."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UploadBody(TypedDict):
    """The form of an upload."""

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]


class Deleted(TypedDict):
    """A file is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


Handler = Callable[[Request, str], Awaitable[Response]]  # with the caller's name


def answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers with errors, too: as OpenAI's API does."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, caller_of(request).name)
        except DiptychError as error:
            return refusal(error, request)
        except OSError as error:
            return refusal(Unavailable(f"the store of batches can't be used now: {error}", retry_after_s=5), request)

    return answer


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a list, as its query asks for it."""

    limit: int
    after: str
    newest_first: bool

    @classmethod
    def of(cls, request: Request, most: int, default: int) -> Window:
        """Raises `InvalidRequest`."""
        query = request.query_params
        limit, order = query.get("limit", str(default)), query.get("order", "desc")
        if not (LIMIT.fullmatch(limit) and 1 <= int(limit) <= most):
            raise InvalidRequest(f"limit must be 1 to {most}", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        return cls(int(limit), query.get("after", ""), order == "desc")

    def ids(self, ids: Sequence[str]) -> Sequence[str]:
        """Return what follows, of ids with the oldest first."""
        if self.newest_first:
            return [each for each in reversed(ids) if not self.after or each < self.after]
        return [each for each in ids if each > self.after]


async def listed(window: Window, ids: Sequence[str], find: Callable[[str], Awaitable[Any]]) -> dict[str, Any]:
    """Return a page of what `find` shows; None: that is not listed."""
    data: list[Any] = []
    for each in window.ids(ids):
        if len(data) > window.limit:
            break
        if (found := await find(each)) is not None:
            data.append(found)
    shown = data[: window.limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {
        "object": "list",
        "data": shown,
        "first_id": first,
        "last_id": last,
        "has_more": len(data) > window.limit,
    }


class FileRoutes:
    """The handlers of the paths."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._limits = UploadLimits(batches.max_file_bytes, batches.stall_s)
        self._uploads: Counter[str] = Counter()  # that are under way, by tenant

    @contextmanager
    def _place(self, tenant: str) -> Iterator[None]:
        """Hold a place of an upload. Raises `Overloaded`."""
        if self._uploads[tenant] >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being uploaded: send this one when one of them is there")
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant]

    async def create(self, request: Request, tenant: str) -> Response:
        form = UploadForm(request.headers.get("content-type", ""))
        now_s = self._batches.clock()
        file_id = new_id("file-", now_s)
        with self._place(tenant):
            async with self._batches.files.upload(tenant, file_id) as upload:
                async for data in file_of(form, request, self._limits):
                    await upload.write(data)
                _check_fields(form.fields)
                facts = FileFacts(file_id, upload.nbytes, now_s, form.file_name or "", INPUT)
                await upload.keep(facts)
        return json_response(_file(facts), request)

    async def index(self, request: Request, tenant: str) -> Response:
        window, purpose = Window.of(request, MAX_LISTED, MAX_LISTED), request.query_params.get("purpose")

        async def find(file_id: str) -> File | None:
            facts = await self._batches.files.find(tenant, file_id)
            return None if facts is None or purpose not in (None, facts.purpose) else _file(facts)

        return json_response(await listed(window, await self._batches.files.ids(tenant), find), request)

    async def show(self, request: Request, tenant: str) -> Response:
        return json_response(_file(await self._find(request, tenant)), request)

    async def content(self, request: Request, tenant: str) -> Response:
        facts = await self._find(request, tenant)
        headers = {HEADER: request_id_of(request.headers), "content-length": str(facts.nbytes)}
        pieces: AsyncIterator[bytes] = self._batches.files.pieces(tenant, facts.file_id)
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")

    async def delete(self, request: Request, tenant: str) -> Response:
        facts = await self._find(request, tenant)
        if (user := await self._batches.jobs.user_of(tenant, facts.file_id)) is not None:
            raise Conflict(f"the batch {user} reads this file: cancel it, or wait until it is over")
        await self._batches.files.delete(tenant, facts.file_id)
        deleted: Deleted = {"id": facts.file_id, "object": "file", "deleted": True}
        return json_response(deleted, request)

    async def _find(self, request: Request, tenant: str) -> FileFacts:
        file_id = request.path_params["file_id"]
        facts = await self._batches.files.find(tenant, file_id) if is_id(file_id) else None
        if facts is None:
            raise NotFound(f"there is no file {file_id[:64]!r}")
        return facts


def _check_fields(fields: Mapping[str, str]) -> None:
    if fields.get("purpose") != INPUT:
        raise InvalidRequest('purpose must be "batch": nothing else is made of files here', param="purpose")
    for name in fields.keys() - {"purpose"}:
        words = f"{name[:64]} is not supported: files stay until they are deleted"
        raise InvalidRequest(words, param=name[:64])


def _file(facts: FileFacts) -> File:
    return {
        "id": facts.file_id,
        "object": "file",
        "bytes": facts.nbytes,
        "created_at": int(facts.created_s),
        "filename": facts.name,
        "purpose": facts.purpose,
        "status": "processed",
    }
