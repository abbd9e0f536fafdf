"""What giver and taker of weights say to each other, over TCP: a proof of both, what is wanted, and pieces of it.

    both     32 random bytes, then HMAC-SHA256 of side and both sides' random bytes, by the giver's key
    taker    the form of its model, which of the streams this is, and of how many
    giver    how many bytes all streams have together; 0: it gives nothing
    giver    each piece of this stream: its XXH3-128, then its bytes

Memory of equal form has equal parts, so both sides cut it alike. Bytes are not encrypted, as KV is not: digests find
what was damaged, and the proof keeps out who is no member.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import xxhash

KEY_NBYTES: Final = 32
DIGEST_NBYTES: Final = 16
PIECE_NBYTES: Final = 8 << 20
MAX_STREAMS: Final = 8
_NONCE_NBYTES: Final = 32
_WANTED: Final = struct.Struct("<32sBB")
_GIVEN: Final = struct.Struct("<Q")

Side = Literal[b"giver", b"taker"]


class Giver(NamedTuple):
    """Where a worker gives its weights."""

    host: str
    port: int
    key: bytes


class Refused(Exception):
    """The other side is not who it should be, or gives nothing."""


class Wanted(NamedTuple):
    """One of the streams in which a model's memory is asked for."""

    form: str
    stream: int
    num_streams: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[begin, end)` of a part."""

    part: int
    begin: int
    end: int


def pieces_of(sizes: Sequence[int], stream: int, num_streams: int) -> list[Piece]:
    """Return what one of the streams brings of parts of these sizes: every so many-th piece."""
    cuts = [
        Piece(part, begin, min(begin + PIECE_NBYTES, size))
        for part, size in enumerate(sizes)
        for begin in range(0, size, PIECE_NBYTES)
    ]
    return cuts[stream::num_streams]


def digest(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def prove(sock: socket.socket, key: bytes, side: Side, until_s: float) -> None:
    """Have each side show the other one that it knows the key. Raises `Refused`; `OSError`, also after `until_s`."""
    ours = secrets.token_bytes(_NONCE_NBYTES)
    sock.sendall(ours)
    theirs = received(sock, _NONCE_NBYTES, until_s)
    nonces = ours + theirs if side == b"giver" else theirs + ours
    sock.sendall(hmac.digest(key, side + nonces, hashlib.sha256))
    other = b"taker" if side == b"giver" else b"giver"
    if not hmac.compare_digest(received(sock, 32, until_s), hmac.digest(key, other + nonces, hashlib.sha256)):
        raise Refused("the other side does not know the key")


def ask(sock: socket.socket, wanted: Wanted, until_s: float) -> int:
    """Return how many bytes are given. Raises `OSError`, also after `until_s`."""
    sock.sendall(_WANTED.pack(wanted.form.encode(), wanted.stream, wanted.num_streams))
    (num_bytes,) = _GIVEN.unpack(received(sock, _GIVEN.size, until_s))
    return int(num_bytes)


def read_wanted(sock: socket.socket, until_s: float) -> Wanted:
    """Raises `Refused` for what makes no sense, and `OSError`, also after `until_s`."""
    form, stream, num_streams = _WANTED.unpack(received(sock, _WANTED.size, until_s))
    if not stream < num_streams <= MAX_STREAMS:
        raise Refused(f"stream {stream} of {num_streams}")
    return Wanted(form.decode("ascii", "replace"), stream, num_streams)


def answer(sock: socket.socket, num_bytes: int) -> None:
    sock.sendall(_GIVEN.pack(num_bytes))


def received(sock: socket.socket, num_bytes: int, until_s: float) -> bytes:
    """Return so many bytes. Raises `OSError` if fewer come until then."""
    data = bytearray(num_bytes)
    receive_into(sock, memoryview(data), until_s)
    return bytes(data)


def receive_into(sock: socket.socket, view: memoryview, until_s: float) -> None:
    """Fill `view`. Raises `OSError` if fewer bytes come until then, or none for as long as the socket's timeout."""
    patience_s = sock.gettimeout()
    while len(view):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other side is too slow")
        sock.settimeout(left_s if patience_s is None else min(left_s, patience_s))
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the connection ended early")
        view = view[count:]
    sock.settimeout(patience_s)
