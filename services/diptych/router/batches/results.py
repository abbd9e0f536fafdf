"""Results of lines: as rows of the parts that a batch's log names, and as lines of its files. Pure.

A row is the line's number, whether it was served, and the line that the client will read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import orjson

from diptych.router.batches.job import Ending

SERVED: Final = b"o"
REFUSED: Final = b"e"
WORDS: Final[Mapping[Ending, str]] = {
    Ending.EXPIRED: "the request was not run before the batch's completion window ended",
    Ending.CANCELLED: "the request was not run before the batch was cancelled",
    Ending.FAILED: "the request was not run: the batch's input was lost, in part or wholly",
    Ending.COMPLETED: "the request was not in the input when the batch began",
}


class Reply(NamedTuple):
    """What the endpoint answers."""

    status: int
    body: bytes  # JSON


class Row(NamedTuple):
    """The result of a line."""

    number: int
    is_served: bool
    data: bytes

    def encode(self) -> bytes:
        return b"%d %s %s\n" % (self.number, SERVED if self.is_served else REFUSED, self.data)


def rows_of(part: bytes) -> Iterator[Row]:
    """Yield the rows of a part."""
    for line in part.splitlines():
        number, kind, data = line.split(b" ", 2)
        yield Row(int(number), kind == SERVED, data)


def request_id(batch_id: str, number: int) -> str:
    """Return the id of a line's request: the same whoever runs it, and however often."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def row_of(batch_id: str, number: int, custom_id: str | None, reply: Reply) -> Row:
    """Return the result of a line that was run."""
    said = request_id(batch_id, number)
    response = {"status_code": reply.status, "request_id": said, "body": orjson.Fragment(reply.body)}
    return Row(number, reply.status == 200, _line(said, custom_id, response, None))


def line_not_run(batch_id: str, number: int, custom_id: str | None, ending: Ending) -> bytes:
    """Return what the file of errors says of a line that was not run."""
    error = {"code": f"batch_{ending.value}", "message": WORDS[ending]}
    return _line(request_id(batch_id, number), custom_id, None, error)


def line_lost(batch_id: str, number: int, custom_id: str | None) -> bytes:
    """Return what the file of errors says of a line whose result is not in the store any more."""
    error = {"code": "result_lost", "message": "the request was run, but its result is not in the store any more"}
    return _line(request_id(batch_id, number), custom_id, None, error)


def rest_lost(batch_id: str, count: int, ending: Ending) -> bytes:
    """Return what the file of errors says of lines that can't be named: the input is lost."""
    words = (
        f"{count} requests were not run, and are not told one by one: the batch's input is not in the store any more"
    )
    error = {"code": f"batch_{ending.value}", "message": words}
    return _line(batch_id.replace("batch_", "batch_req_", 1), None, None, error)


def _line(said: str, custom_id: str | None, response: object, error: Mapping[str, str] | None) -> bytes:
    told: dict[str, Any] = {"id": said, "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(told)
