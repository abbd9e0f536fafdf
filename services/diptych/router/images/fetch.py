"""Fetches images from the internet, and from nowhere else.

A client names the URL, so whoever fetches it can be sent anywhere that this process reaches: to the metadata of a
cloud, to services that trust their network. Rule: each hop's host is on the operator's list, its name is resolved once,
all addresses that it has are public, and the connection goes to one of those: no second look at the name can give
another. Whatever fails is told in the same words; the log has the reason.
"""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import httpcore2

from diptych.common.errors import DiptychError, InvalidRequest, Overloaded
from diptych.router.images.addresses import Place, is_listed, is_public, place_of
from diptych.router.images.turns import RETRY_AFTER_S, Places, Turns
from diptych.router.values.images import MAX_URL_LEN, ImageInput

logger = logging.getLogger(__name__)

MAX_HOPS: Final = 4  # redirects, and the last answer
MAX_ADDRESSES: Final = 4  # of a host, to try
MAX_FETCHES: Final = 64  # at once; of one caller a quarter
NUM_RESOLVERS: Final = 64  # threads, started when they are needed: no look-up waits for others' silent name servers
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
TYPES: Final = ("image/", "application/octet-stream", "binary/octet-stream")  # the latter: object stores
HEADERS: Final = [(b"accept", b"image/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"diptych")]

_IN_TARGETS: Final = "%/:=&?~+!$,;'@()*[]"

Grow = Callable[[int], None]  # so many bytes more are held; raises what refuses them
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class NotFetched(Exception):
    """Why there is no image, for the log alone."""


class Resolver:
    """Looks up the addresses of hosts, in threads of its own, of which look-ups of one caller have a quarter.

    One can't be stopped: it counts until its name server has answered, whoever still waits for it.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_RESOLVERS, thread_name_prefix="resolve")
        self._places = Places(NUM_RESOLVERS, "hosts are being looked up")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, host: str, port: int, caller: str = "") -> Sequence[str]:
        """Raises `NotFetched`, and what `Places.take` raises."""
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            stack.enter_context(self._places.take(caller))
            looking = self._threads.submit(_addresses, host, port)
            place = stack.pop_all()
        looking.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(place.close))
        try:
            found = await asyncio.wrap_future(looking)
        except OSError as error:
            raise NotFetched(f"{host} has no address: {error}") from None
        return list(dict.fromkeys(str(each[4][0]) for each in found))


def _addresses(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to public addresses only."""

    def __init__(self, resolve: Resolve, is_allowed: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the library's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        if refused := [address for address in addresses if not self._is_allowed(address)]:
            raise NotFetched(f"{host} is at {refused[0]}, which is no public address")
        problem: Exception = NotFetched(f"{host} has no address")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                problem = error
        try:
            raise problem
        finally:
            del problem  # its traceback has this frame: the two would keep each other


class _Way(NamedTuple):
    """How the bytes of one image come here."""

    network: CheckedNetwork
    grow: Grow


class ImageFetcher:
    """Fetches what URLs of clients name. Used from one event loop; `close` it."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        max_bytes: int,
        timeout_s: float,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`hosts` are the operator's, none: nothing is fetched. `timeout_s` is for all hops of one image, and for
        the turn that it waits for.

        Without `tls` the system's authorities are trusted.
        """
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolver = Resolver()
        self._resolve, self._is_allowed = resolve, is_allowed
        self._tls = tls or (ssl.create_default_context() if hosts else None)
        self._turns = Turns(MAX_FETCHES)

    def close(self) -> None:
        self._resolver.close()

    def check(self, image: ImageInput) -> None:
        """Raise `InvalidRequest` for an image at a URL that can't be fetched whatever it answers."""
        if not image.url:
            return
        if not self._hosts:
            words = "this server fetches no images: send the image itself, as data:image/png;base64,..."
            raise InvalidRequest(words, param=image.param)
        place = place_of(image.url)
        if place is None or not is_listed(place, self._hosts):
            words = "this server fetches no images from this host: send the image itself, as data:image/png;base64,..."
            raise InvalidRequest(words, param=image.param)

    async def fetch(self, image: ImageInput, caller: str = "", grow: Grow = lambda num_bytes: None) -> bytes:
        """Return the file. `grow` hears of its bytes as they come.

        Raises `InvalidRequest`, whose words tell nothing of networks, `Overloaded`, and what `grow` raises.
        """
        resolve = self._resolve or partial(self._resolver, caller=caller)
        way = _Way(CheckedNetwork(resolve, self._is_allowed), grow)
        has_turn = False
        try:
            async with asyncio.timeout(self._timeout_s), self._turns.take(caller):
                has_turn = True
                return await self._follow(image.url, way)
        except DiptychError:
            raise
        except TooLarge:
            words = f"the image at a URL has more than {self._max_bytes} bytes: send a smaller one"
            raise InvalidRequest(words, param=image.param) from None
        except Exception as error:  # of turns, names, networks, TLS and the protocol: of many kinds
            if not has_turn:
                words = "images of too many requests are being fetched: try again soon"
                raise Overloaded(words, retry_after_s=RETRY_AFTER_S) from None
            place = place_of(image.url)
            reason = f"{type(error).__name__}: {error}"
            logger.info("no image from %s: %s", place.host if place else "?", reason)
        words = "no image could be fetched from a URL: check that it is public, and leads to an image"
        raise InvalidRequest(words, param=image.param)

    async def _follow(self, url: str, way: _Way) -> bytes:
        for _ in range(MAX_HOPS):
            place = place_of(url)
            if place is None or not is_listed(place, self._hosts):
                raise NotFetched("it leads to a host that is not on the list")
            found = await self._get(url, place, way)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
            if len(url) > MAX_URL_LEN:
                raise NotFetched("it leads to a URL that is too long")
        raise NotFetched("it leads on and on")

    async def _get(self, url: str, place: Place, way: _Way) -> bytes | str:
        """Return the file, or where it is instead. One connection a hop: none is kept that was opened for another."""
        where = httpcore2.URL(scheme=place.scheme, host=place.host, port=place.port, target=_target(url))
        async with (
            httpcore2.AsyncConnectionPool(self._tls, network_backend=way.network) as pool,
            pool.stream("GET", where, headers=[(b"host", _host(place)), *HEADERS]) as answer,
        ):
            headers = {name.lower(): value.decode("latin-1") for name, value in answer.headers}
            if answer.status in REDIRECTS:
                return headers.get(b"location", "")
            _check_head(answer.status, headers)
            return await self._read(answer, headers.get(b"content-length", ""), way.grow)

    async def _read(self, answer: httpcore2.Response, declared: str, grow: Grow) -> bytes:
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise TooLarge
        body = io.BytesIO()  # which gives its bytes away without a copy
        async for part in answer.aiter_stream():
            if body.tell() + len(part) > self._max_bytes:
                raise TooLarge
            grow(len(part))
            body.write(part)
        return body.getvalue()


class TooLarge(Exception):
    """A file has more bytes than are read."""


def _check_head(status: int, headers: dict[bytes, str]) -> None:
    kind, coding = headers.get(b"content-type", "").lower(), headers.get(b"content-encoding", "identity")
    if status != 200:
        raise NotFetched(f"its status is {status}")
    if not kind.startswith(TYPES):
        raise NotFetched(f"it is of the type {kind!r}")
    if coding.lower() != "identity":
        raise NotFetched(f"it is encoded as {coding!r}")


def _host(place: Place) -> bytes:
    name = f"[{place.host}]" if ":" in place.host else place.host
    usual = (place.scheme, place.port) in (("http", 80), ("https", 443))
    return (name if usual else f"{name}:{place.port}").encode("ascii")


def _target(url: str) -> str:
    """Return path and query, as `place_of` has read the URL: nobody else reads it."""
    parts = urlsplit(url)
    return quote(f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}", safe=_IN_TARGETS)
