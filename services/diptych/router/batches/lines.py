"""The lines of a batch's input: cut out of a stream of bytes, and held against what a request must say. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

import orjson

from diptych.router.batches.job import Problem

MAX_LINES: Final = 50_000  # requests of a batch, as OpenAI's API has it
MAX_PROBLEMS: Final = 100  # that are told
MAX_ID_LEN: Final = 512  # characters of a custom_id
BLANK: Final = re.compile(rb"(?:[ \t\r\v\f]*+\n)++")  # lines that say nothing
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class Line(NamedTuple):
    """A line that says something."""

    number: int  # from 1, blank ones counted
    data: bytes  # cut after the longest that is read


class LineSplitter:
    """Cuts what it is fed into lines; of a line that is too long it keeps one byte too many, and no more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._begun = bytearray()
        self._number = 0

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yield the lines that are complete now."""
        start = 0
        while True:
            if not self._begun and (blank := BLANK.match(data, start)):
                self._number += data.count(b"\n", start, blank.end())
                start = blank.end()
            end = data.find(b"\n", start)
            if end < 0:
                break
            self._add(data[start:end])
            start = end + 1
            yield from self._end()
        self._add(data[start:])

    def close(self) -> Iterator[Line]:
        """Yield the last line, which may lack its end."""
        yield from self._end()

    def _add(self, piece: bytes) -> None:
        self._begun += piece[: max(0, self._max_bytes + 1 - len(self._begun))]

    def _end(self) -> Iterator[Line]:
        self._number += 1
        data = bytes(self._begun)
        self._begun.clear()
        if data.strip():
            yield Line(self._number, data)


class Call(NamedTuple):
    """What a line asks for."""

    custom_id: str
    url: str
    body: bytes  # JSON
    model: str  # as it is named there; empty: not at all


class LineError(Exception):
    """A line is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def read_line(line: Line, endpoint: str, max_bytes: int) -> Call:
    """Raises `LineError`."""
    if len(line.data) > max_bytes:
        raise LineError("line_too_long", f"a line has at most {max_bytes} bytes")
    try:
        said = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"this line is not valid JSON: {error}") from None
    if not isinstance(said, dict):
        raise LineError("invalid_json_line", "a line is a JSON object with custom_id, method, url and body")
    custom_id, url, body = said.get("custom_id"), said.get("url"), said.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_LEN:
        raise LineError("invalid_custom_id", f"custom_id is a text of 1 to {MAX_ID_LEN} characters", "custom_id")
    if said.get("method") != "POST":
        raise LineError("invalid_method", 'method must be "POST"', "method")
    if url != endpoint:
        raise LineError("mismatched_url", f"url must be {endpoint}, the batch's endpoint, not {url!r:.100}", "url")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "body must be a JSON object: what the endpoint takes", "body")
    if body.get("stream"):
        raise LineError("invalid_body", "nobody reads a stream of a batch: leave `stream` out", "body.stream")
    try:
        return Call(custom_id, url, orjson.dumps(body), model if isinstance(model := body.get("model"), str) else "")
    except TypeError as error:  # it writes less deep ones than it reads
        raise LineError("invalid_body", f"body can't be passed on: {error}", "body") from None


class Validation:
    """Looks at all lines of an input, one after another."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._seen: set[bytes] = set()  # digests: ids may be long
        self.total = 0
        self.problems: list[Problem] = []

    @property
    def is_hopeless(self) -> bool:
        """Whether the rest needn't be looked at."""
        return len(self.problems) >= MAX_PROBLEMS or self.total > MAX_LINES

    def check(self, line: Line) -> None:
        self.total += 1
        if self.total > MAX_LINES:
            words = f"a batch has at most {MAX_LINES} requests: make several of it"
            self.problems.append(Problem("too_many_requests", words, line.number))
            return
        try:
            call = read_line(line, self._endpoint, self._max_bytes)
            self._check_new(call.custom_id)
        except LineError as error:
            self.problems.append(Problem(error.code, str(error), line.number, error.param))

    def end(self) -> None:
        if not self.total:
            self.problems.append(Problem("empty_file", "the input file has no requests: give one a line"))

    def _check_new(self, custom_id: str) -> None:
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            words = f"custom_id {custom_id[:64]!r} is that of an earlier line, too"
            raise LineError("duplicate_custom_id", words, "custom_id")
        self._seen.add(digest)
