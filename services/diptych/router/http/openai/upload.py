"""Reads an upload of a file, as a form of several parts: piece by piece, and never the whole file at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from diptych.common.errors import InvalidRequest
from diptych.router.errors import BodyCutOff, BodyTooSlow, PayloadTooLarge

FORM: Final = b"multipart/form-data"
MAX_FIELD_BYTES: Final = 1024  # of what is not the file
MAX_FIELDS: Final = 16
MAX_NAME_LEN: Final = 255
OVERHEAD_BYTES: Final = 1 << 16  # of a form, beside its file
MIN_BYTES_S: Final = 1 << 14  # of an upload, from the moment on that it might have stood still


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What a client may upload, and how slowly."""

    max_bytes: int
    stall_s: float  # without any of it


class UploadForm:
    """A form as it comes: its fields, and the bytes of its file."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != FORM or not options.get(b"boundary"):
            raise InvalidRequest("a file is uploaded as multipart/form-data, with the parts `file` and `purpose`")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None  # None: no file came yet
        self.is_complete = False
        self._file = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._header = (bytearray(), bytearray())
        self._part = ""
        self._value = bytearray()
        callbacks: Any = {name: getattr(self, f"_{name}") for name in _EVENTS}
        self._parser = MultipartParser(options[b"boundary"], callbacks)

    def feed(self, data: bytes) -> bytes:
        """Return what came of the file. Raises `InvalidRequest`."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the form can't be read: {error}") from None
        found = bytes(self._file)
        self._file.clear()
        return found

    def _on_part_begin(self) -> None:
        self._headers, self._value = {}, bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _on_header_end(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part == "file":
            if self.file_name is not None:
                raise InvalidRequest("the form has two files: upload one at a time", param="file")
            self.file_name = options.get(b"filename", b"file").decode("utf-8", "replace")[:MAX_NAME_LEN]

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self._file += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._part:.64} is longer than {MAX_FIELD_BYTES} bytes", param=self._part[:64])

    def _on_part_end(self) -> None:
        if self._part != "file":
            self.fields[self._part] = self._value.decode("utf-8", "replace")
            if len(self.fields) > MAX_FIELDS:
                raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields")

    def _on_end(self) -> None:
        self.is_complete = True


_EVENTS: Final = (
    "on_part_begin",
    "on_part_data",
    "on_part_end",
    "on_header_field",
    "on_header_value",
    "on_header_end",
    "on_headers_finished",
    "on_end",
)


async def file_of(form: UploadForm, request: Request, limits: UploadLimits) -> AsyncIterator[bytes]:
    """Yield the file. Raises `PayloadTooLarge`, `BodyTooSlow`, `BodyCutOff` and `InvalidRequest`."""
    declared, nbytes = request.headers.get("content-length", ""), 0
    if declared.isdigit() and int(declared) > limits.max_bytes + OVERHEAD_BYTES:
        raise _too_large(limits)
    async for data in _body(request, limits):
        if found := form.feed(data):
            nbytes += len(found)
            if nbytes > limits.max_bytes:
                raise _too_large(limits)
            yield found
    if not form.is_complete:
        raise InvalidRequest("the form ends before its last boundary: send all of it")
    if form.file_name is None:
        raise InvalidRequest("the form has no part `file`: upload one", param="file")


async def _body(request: Request, limits: UploadLimits) -> AsyncIterator[bytes]:
    more, end_s = True, time.monotonic() + limits.stall_s
    while more:
        try:
            async with asyncio.timeout(limits.stall_s):
                message = await request.receive()
        except TimeoutError:
            raise BodyTooSlow(f"nothing of the file came for {limits.stall_s:g} s: send it again") from None
        if message["type"] == "http.disconnect":
            raise BodyCutOff("the client left before its file was complete")
        more, data = message.get("more_body", False), message.get("body", b"")
        end_s += len(data) / MIN_BYTES_S
        if time.monotonic() > end_s:
            raise BodyTooSlow(f"a file comes with at least {MIN_BYTES_S} bytes a second: send it faster")
        yield data


def _too_large(limits: UploadLimits) -> PayloadTooLarge:
    return PayloadTooLarge(f"a file has at most {limits.max_bytes} bytes: make several batches of it", param="file")
