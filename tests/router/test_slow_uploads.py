"""A client whose request does not come, or comes too slowly, is told so, and keeps its connection no longer."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Cluster = Any

STALL_S = 0.3
PIECE_S = STALL_S / 5  # between the bytes of a client that sends one at a time
HALF = b'{"prompt": "p'
HEAD = b"POST %s HTTP/1.1\r\nhost: router\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster(client_stall_s=STALL_S, max_body_bytes=1000)


@contextmanager
def connected(cluster: Cluster) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", cluster.router.http.port), timeout=200) as connection:
        yield connection


def read_until_closed(connection: socket.socket) -> bytes:
    answer = b""
    while piece := connection.recv(65536):
        answer += piece
    return answer


def drip_until_closed(connection: socket.socket, many: bytes) -> bytes:
    """Send one byte at a time, for as long as the server wants to hear more."""
    answer, left = b"", iter(many)
    while True:
        while not select.select([connection], [], [], PIECE_S)[0]:
            connection.sendall(bytes([next(left)]))
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:  # the last byte met a closed port
            return answer
        if not piece:
            return answer
        answer += piece


def status_and_error(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages", b"/tokenize"])
def test_a_body_that_stops_coming_is_answered_with_408_and_the_connection_closed(cluster: Cluster, path: bytes) -> None:
    with connected(cluster) as connection:
        connection.sendall(HEAD % (path, 100) + HALF)
        status, error = status_and_error(read_until_closed(connection))
    assert (status, error["message"]) == (408, "nothing of the body came for 0.3 s: send the request again")


def test_such_a_request_is_counted_as_one_whose_client_left(cluster: Cluster) -> None:
    with connected(cluster) as connection:
        connection.sendall(HEAD % (b"/generate", 100) + HALF)
        read_until_closed(connection)
    counted = 'requests_total{api="generate",outcome="disconnected"} 1.0'
    cluster.wait_until(lambda: counted in cluster.get("/metrics")[1])


def test_a_body_that_comes_byte_by_byte_is_answered_with_408_once_the_request_took_too_long(start_cluster: Any) -> None:
    cluster = start_cluster(request_timeout_s=STALL_S)
    with connected(cluster) as connection:
        connection.sendall(HEAD % (b"/v1/completions", 10**6))
        status, error = status_and_error(drip_until_closed(connection, b"x" * 10**6))
    assert (status, error["message"]) == (408, "the body was not complete after 0.3 s: send the request again, faster")


@pytest.mark.parametrize("begun", [b"P", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_stops_coming_is_answered_with_408(cluster: Cluster, begun: bytes) -> None:
    with connected(cluster) as connection:
        connection.sendall(begun)
        answer = read_until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the request's head was not complete after 0.3 s" in answer


def test_a_head_that_comes_byte_by_byte_gets_no_more_time(cluster: Cluster) -> None:
    with connected(cluster) as connection:
        answer = drip_until_closed(connection, b"GET /health HTTP/1.1\r\nx: " + b"x" * 10**5)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_head_that_stops_coming_after_an_earlier_request_is_answered_with_408(cluster: Cluster) -> None:
    with connected(cluster) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += connection.recv(65536)
        connection.sendall(b"GET /health HT")
        assert read_until_closed(connection).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_goes_on_sending_a_body_that_was_refused_is_cut_off(cluster: Cluster) -> None:
    with connected(cluster) as connection:
        connection.sendall(HEAD % (b"/v1/completions", 10**6))
        answer = drip_until_closed(connection, b"x" * 10**6)
    assert answer.startswith(b"HTTP/1.1 413 ")
