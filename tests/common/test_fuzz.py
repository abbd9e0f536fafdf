"""Whatever a client sends, its connection keeps little, parses each byte once, and every answer is a whole one."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Final

from fake_transport import connect, echo
from fuzzing import fuzz, malformed
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.net.http_connection import MAX_HEAD_BYTES, MAX_WAITING_REQUESTS

KEPT_BYTES: Final = 2**20
GET: Final = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST: Final = b"POST /v1 HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc"
CHUNKED: Final = (
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n3;a=b\r\nabc\r\n0\r\nt: u\r\n\r\n"
)
UPGRADE: Final = b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"

REPEATED: Final = st.builds(
    lambda piece, number: piece * (number // len(piece)),
    st.sampled_from(
        (
            b"x",
            b" ",
            b"\r\n",
            b"a:b\r\n",
            b"a: " + b"v" * 300 + b"\r\n",
            b"1\r\nx\r\n",
            b"1;e=f\r\nx\r\n",
            b";e",
            GET,
            POST,
        )
    ),
    st.sampled_from((100, MAX_HEAD_BYTES - 1, MAX_HEAD_BYTES, MAX_HEAD_BYTES + 1, 2**17, 2**18)),
)
BEGINNINGS: Final = st.sampled_from(
    tuple(request[:at] for request in (GET, POST, CHUNKED, UPGRADE) for at in (1, 5, 16, 20, 40, 70, 90, len(request)))
)
PIECES: Final = st.lists(
    st.one_of(BEGINNINGS, REPEATED, malformed(GET, POST, CHUNKED, UPGRADE)), min_size=1, max_size=6
)


@fuzz
@given(PIECES, st.booleans())
def test_no_bytes_make_a_connection_keep_much_or_answer_half(pieces: list[bytes], together: bool) -> None:
    most_bytes, answer, is_closed = asyncio.run(asyncio.wait_for(feed(pieces, together=together), 200))
    assert most_bytes < KEPT_BYTES + 2 * max(map(len, pieces))  # what a body holds, and its copy for the reader
    head, *answers = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 ")
    assert head == b""
    for one in answers:
        fields, _, body = one.partition(b"\r\n\r\n")
        (length,) = [int(line[16:]) for line in fields.split(b"\r\n") if line.startswith(b"content-length: ")]
        assert len(body) == length
        assert int(fields[:3]) in (200, 400, 414, 431)
    if is_closed and answers:
        assert b"connection: close" in answers[-1] or b"HTTP/1.0" in b"".join(pieces)


async def feed(pieces: list[bytes], *, together: bool) -> tuple[int, bytes, bool]:
    """Return the most bytes that were held meanwhile, what was answered, and whether that was the end."""
    connection, transport = connect(echo)
    tracemalloc.start()
    for piece in pieces:
        if not transport.is_closed:
            connection.data_received(piece)
            assert len(connection.pipeline) <= MAX_WAITING_REQUESTS
            if not together:
                await asyncio.sleep(0)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    is_closed = transport.is_closed
    connection.eof_received()
    connection.connection_lost(None)
    while connection.tasks:
        await asyncio.wait(connection.tasks)
    return most_bytes, bytes(transport.written), is_closed
