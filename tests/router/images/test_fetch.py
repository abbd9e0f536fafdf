"""Images are fetched from public hosts that the operator names, over real connections, and from nowhere else."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.common.errors import InvalidRequest, Overloaded
from diptych.router.errors import RateLimited
from diptych.router.images import fetch
from diptych.router.images.addresses import is_public
from diptych.router.images.fetch import NUM_RESOLVERS, ImageFetcher, Resolver
from diptych.router.images.turns import Turns
from diptych.router.values.images import ImageInput

FILE = b"x" * 5000
WORDS = "no image could be fetched from a URL: check that it is public, and leads to an image"
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def head(status: str = "200 OK", **fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


def file(body: bytes = FILE, **fields: str) -> bytes:
    return head(**{"content_type": "image/png", "content_length": str(len(body)), **fields}) + body


class Site:
    """An HTTP server on this machine, under any name."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {"/a.png": file()}
        self.asked: list[tuple[str, str]] = []  # host, path
        self.addresses: dict[str, Sequence[str]] = {}  # of names, one after the other
        self.resolved: list[str] = []
        self.port = 0
        self.hangs = asyncio.Event()

    def url(self, path: str = "/a.png", host: str = "images.example") -> str:
        return f"http://{host}:{self.port}{path}"

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        return self.addresses.get(host, ["127.0.0.1"])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = request[0].split()[1]
        host = next(line.partition(": ")[2] for line in request if line.lower().startswith("host:"))
        self.asked.append((host, path))
        page = self.pages.get(path, head("404 Not Found", content_length="0"))
        writer.write(page)
        if path.startswith("/hangs"):
            await self.hangs.wait()
        writer.close()


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    found = Site()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found
        found.hangs.set()


def fetcher(site: Site, hosts: Sequence[str] = (), **how: object) -> ImageFetcher:
    """Return one that takes 127.0.0.1 for a public address."""
    allowed = hosts or (f"images.example:{site.port}",)
    options = {"max_bytes": 10_000, "timeout_s": 30.0, "is_allowed": lambda a: a == "127.0.0.1" or is_public(a), **how}
    return ImageFetcher(allowed, resolve=site.resolve, **options)  # type: ignore[arg-type]


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await fetcher.fetch(ImageInput("messages", url=url))
    assert caught.value.param == "messages"
    return str(caught.value)


def in_loop(test: Callable[[Site], Awaitable[None]]) -> Callable[[], None]:
    async def run() -> None:
        async with site() as found:
            await test(found)

    def sync() -> None:
        asyncio.run(run())

    sync.__name__ = test.__name__
    return sync


@in_loop
async def test_a_file_comes_as_it_is(site: Site) -> None:
    assert await fetcher(site).fetch(ImageInput("messages", url=site.url("/a.png#x"))) == FILE
    assert site.asked == [(f"images.example:{site.port}", "/a.png")]


@in_loop
async def test_path_and_query_are_kept(site: Site) -> None:
    site.pages["/b%20c?d=%C3%A9&e=1"] = file()
    assert await fetcher(site).fetch(ImageInput("messages", url=site.url("/b c?d=é&e=1"))) == FILE


@in_loop
async def test_pieces_without_a_length_are_put_together(site: Site) -> None:
    site.pages["/c"] = head(content_type="image/png", transfer_encoding="chunked") + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert await fetcher(site).fetch(ImageInput("messages", url=site.url("/c"))) == b"abcde"


@in_loop
async def test_a_redirect_is_followed(site: Site) -> None:
    site.pages["/old"] = head("302 Found", location="/a.png", content_length="0")
    assert await fetcher(site).fetch(ImageInput("messages", url=site.url("/old"))) == FILE


@in_loop
async def test_redirects_end(site: Site) -> None:
    site.pages["/loop"] = head("302 Found", location="/loop", content_length="0")
    assert await refusal(fetcher(site), site.url("/loop")) == WORDS
    assert len(site.asked) == 4


@in_loop
async def test_each_hop_is_checked(site: Site) -> None:
    for number, target in enumerate(
        (f"http://other.example:{site.port}/a.png", "file:///etc/passwd", f"http://127.0.0.1:{site.port}/a.png")
    ):
        site.pages[f"/{number}"] = head("307 Temporary Redirect", location=target, content_length="0")
        assert await refusal(fetcher(site), site.url(f"/{number}")) == WORDS
    assert len(site.asked) == 3
    assert set(site.resolved) == {"images.example"}


@in_loop
async def test_a_name_of_a_private_address_is_never_connected_to(site: Site) -> None:
    strict = fetcher(site, is_allowed=is_public)
    for addresses in (["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["::1"], ["8.8.8.8", "127.0.0.1"]):
        site.addresses["images.example"] = addresses
        assert await refusal(strict, site.url()) == WORDS
    assert site.asked == []


@in_loop
async def test_a_name_is_resolved_once_a_hop(site: Site) -> None:
    await fetcher(site).fetch(ImageInput("messages", url=site.url()))
    assert site.resolved == ["images.example"]


@in_loop
async def test_a_redirect_to_a_name_that_has_become_private_is_not_followed(site: Site) -> None:
    site.pages["/old"] = head("302 Found", location=site.url(host="images.example"), content_length="0")
    answers = iter((["127.0.0.1"], ["10.0.0.1"]))

    async def rebind(host: str, port: int) -> Sequence[str]:
        return next(answers)

    bound = ImageFetcher(
        [f"images.example:{site.port}"],
        max_bytes=10_000,
        timeout_s=200.0,
        resolve=rebind,
        is_allowed=lambda a: a == "127.0.0.1",
    )
    assert await refusal(bound, site.url("/old")) == WORDS
    assert len(site.asked) == 1


@in_loop
async def test_the_next_address_is_tried(site: Site) -> None:
    site.addresses["images.example"] = ["127.0.0.2", "127.0.0.1"]  # at the first nobody listens
    found = fetcher(site, is_allowed=lambda a: a.startswith("127."))
    assert await found.fetch(ImageInput("messages", url=site.url())) == FILE


@in_loop
async def test_whatever_fails_is_told_in_the_same_words(site: Site) -> None:
    site.pages |= {
        "/error": head("500 Internal", content_length="0"),
        "/page": file(content_type="text/html"),
        "/none": head(content_length="0"),
        "/zip": file(content_encoding="gzip"),
        "/cut": file()[:-10],
        "/no-http": b"SSH-2.0-server\r\n\r\n",
    }
    for path in ("/missing", "/error", "/page", "/none", "/zip", "/cut", "/no-http"):
        assert await refusal(fetcher(site), site.url(path)) == WORDS, path
    closed = site.url().replace(str(site.port), "1")
    assert await refusal(fetcher(site, ["images.example:1"]), closed) == WORDS


@in_loop
async def test_a_name_without_an_address_is_told_in_the_same_words(site: Site) -> None:
    found = ImageFetcher(["nobody.invalid"], max_bytes=100, timeout_s=200.0)
    assert await refusal(found, "http://nobody.invalid/") == WORDS
    found.close()


@in_loop
async def test_a_server_that_goes_silent_is_left(site: Site) -> None:
    site.pages["/hangs"] = file()[:-10]
    assert await refusal(fetcher(site, timeout_s=0.2), site.url("/hangs")) == WORDS


@in_loop
async def test_a_file_that_is_too_long_is_refused_declared_or_not(site: Site) -> None:
    site.pages["/hangs-declared"] = head(content_type="image/png", content_length="1000000000")
    site.pages["/hangs-streamed"] = head(content_type="image/png") + b"x" * 20_000  # and nobody knows how much follows
    for path in ("/hangs-declared", "/hangs-streamed"):
        assert "more than 10000 bytes" in await refusal(fetcher(site), site.url(path))


def test_a_caller_whose_name_servers_are_silent_leaves_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up goes on when nobody waits for it any more: until then it counts."""
    may_end = threading.Event()

    def silent(host: str, port: int) -> list[Any]:
        assert host == "quick.example" or may_end.wait(60)
        return [(None, None, None, None, ("8.8.8.8", port))]

    monkeypatch.setattr(fetch, "_addresses", silent)

    async def check() -> None:
        resolver = Resolver()
        waiting = [asyncio.create_task(resolver("slow.example", 80, "alice")) for _ in range(NUM_RESOLVERS // 4)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(RateLimited, match="being looked up of too many requests of 'alice'"):
            await resolver("quick.example", 80, "alice")
        assert await resolver("quick.example", 80, "bob") == ["8.8.8.8"]
        may_end.set()
        await asyncio.to_thread(resolver._threads.shutdown)  # they call the loop before they end
        assert not resolver._places._taken
        resolver._threads = ThreadPoolExecutor(1)
        assert await resolver("quick.example", 80, "alice") == ["8.8.8.8"]
        resolver.close()

    asyncio.run(check())


@in_loop
async def test_who_gets_no_turn_in_time_is_told_so(site: Site) -> None:
    site.pages["/hangs"] = file()[:-10]
    found = fetcher(site)
    found._turns = Turns(1)
    first = asyncio.create_task(refusal(found, site.url("/hangs")))
    while not site.asked:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.001)
    found._timeout_s = 0.1
    with pytest.raises(Overloaded, match="being fetched: try again soon"):
        await found.fetch(ImageInput("messages", url=site.url()))
    site.hangs.set()
    assert await first == WORDS


@pytest.mark.parametrize("url", ["http://images.example/", "http://user:word@images.example/", "http://[::1/"])
def test_nothing_is_fetched_unless_the_operator_names_hosts(url: str) -> None:
    async def check() -> None:
        closed, other = (ImageFetcher(hosts, max_bytes=1, timeout_s=1) for hosts in ((), ("other.example",)))
        for each, words in ((closed, "fetches no images"), (other, "from this host")):
            with pytest.raises(InvalidRequest, match=words):
                each.check(ImageInput("messages", url=url))
            each.check(ImageInput("messages", file="AAAA"))

    asyncio.run(check())


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_a_certificate_must_be_of_the_name_in_the_url(tmp_path: Path) -> None:
    """The connection goes to a checked address; who answers there must prove to be the host all the same."""
    cert, key = tmp_path / "cert", tmp_path / "key"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=images.example"
    names = ("-addext", "subjectAltName=DNS:images.example", "-keyout", str(key), "-out", str(cert))
    subprocess.run([*made.split(), *names], check=True, capture_output=True)

    async def check() -> None:
        found = Site()
        server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_tls.load_cert_chain(cert, key)
        server = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=server_tls)
        found.port = server.sockets[0].getsockname()[1]
        client_tls = ssl.create_default_context(cafile=str(cert))
        hosts = [f"{name}:{found.port}" for name in ("images.example", "other.example")]
        async with server:
            for host, is_known in (("images.example", True), ("other.example", False)):
                image = ImageInput("messages", url=f"https://{host}:{found.port}/a.png")
                fetching = fetcher(found, hosts, tls=client_tls).fetch(image)
                if is_known:
                    assert await fetching == FILE
                else:
                    with pytest.raises(InvalidRequest, match="no image could be fetched"):
                        await fetching

    asyncio.run(check())
