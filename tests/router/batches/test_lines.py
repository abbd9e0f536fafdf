"""The input is cut into lines as it comes, blank ones for nearly nothing."""

from __future__ import annotations

import random
import sys

import pytest

from diptych.router.batches.lines import Line, LineError, LineSplitter, read_line


def cut(data: bytes, sizes: list[int]) -> list[Line]:
    """Return the lines of an input that comes in pieces of these sizes."""
    splitter, start = LineSplitter(5), 0
    found: list[Line] = []
    for size in sizes:
        found += splitter.feed(data[start : start + size])
        start += size
    return [*found, *splitter.feed(data[start:]), *splitter.close()]


def test_lines_have_the_numbers_that_an_editor_shows_however_they_come() -> None:
    rng = random.Random(1)
    for _ in range(500):
        data = bytes(rng.choice(b"\n\n\n \t\rab") for _ in range(rng.randrange(40)))
        expected = [Line(number, line[:6]) for number, line in enumerate(data.split(b"\n"), 1) if line[:6].strip()]
        assert cut(data, [rng.randrange(6) for _ in range(6)]) == expected, data


def test_a_piece_of_blank_lines_holds_nobody_up() -> None:
    splitter, calls = LineSplitter(1000), list[str]()
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        found = list(splitter.feed(b"\n" * (1 << 20))), list(splitter.feed(b"x\n"))
    finally:
        sys.setprofile(None)
    assert found == ([], [Line((1 << 20) + 1, b"x")])
    assert len(calls) < 100, "not some for each line"


def test_a_body_that_is_nested_too_deeply_to_be_written_is_refused_when_it_is_read() -> None:
    body = b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}"
    line = Line(1, b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": ' + body + b"}")
    with pytest.raises(LineError, match="can't be passed on") as caught:
        read_line(line, "/v1/completions", 10_000)
    assert caught.value.code == "invalid_body"
