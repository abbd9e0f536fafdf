"""Images of a request are read together, in order, and what they take is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from pictures import LIMITS, VISION, file_of, picture

from diptych.common.errors import InvalidRequest, Overloaded
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.admission.held_pixels import HeldPixels
from diptych.router.errors import RateLimited
from diptych.router.images import reader as reader_module
from diptych.router.images.decode import OpenedImage, open_image, read_image
from diptych.router.images.fetch import ImageFetcher
from diptych.router.images.reader import ImageReader
from diptych.router.text.fair_threads import FairThreadPool
from diptych.router.values.images import ImageInput

FILES = {f"/{seed}": file_of(picture(seed=seed)) for seed in range(3)}
PIXELS = 3 * 24 * 32


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
    file = FILES.get(path, b"")
    status = "200 OK" if file else "404 Not Found"
    writer.write(f"HTTP/1.1 {status}\r\ncontent-type: image/png\r\ncontent-length: {len(file)}\r\n\r\n".encode() + file)
    writer.close()


async def resolve(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


async def read(paths: Sequence[str], budget: BodyBudget, num_copies: int = 1) -> list[bytes]:
    """Return the pixels of images at these paths, behind one that is sent."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        place = f"a.example:{server.sockets[0].getsockname()[1]}"
        fetcher = ImageFetcher(
            [place], max_bytes=LIMITS.file_bytes, timeout_s=200.0, resolve=resolve, is_allowed=lambda address: True
        )
        reader = ImageReader(VISION, LIMITS, fetcher, FairThreadPool(2, "test"), 1)
        images = [ImageInput("p", file=FILES["/0"]), *(ImageInput("p", url=f"http://{place}{path}") for path in paths)]
        try:
            with HeldPixels(budget, "alice") as held:
                found = await reader.read(images, held, "", num_copies)
                assert budget.num_bytes == num_copies * PIXELS * len(images)  # files are not held any more
        finally:
            assert budget.num_bytes == 0
            reader.close()
        return [each.image.rgb for each in found]


def pixels(path: str) -> bytes:
    return read_image(open_image(ImageInput("p"), FILES[path], VISION, LIMITS)).image.rgb


def test_fetched_images_and_sent_ones_keep_their_order() -> None:
    found = asyncio.run(read(["/2", "/1"], BodyBudget(1 << 20, "images"), num_copies=2))
    assert found == [pixels("/0"), pixels("/2"), pixels("/1")]


def test_one_that_can_not_be_fetched_ends_it() -> None:
    with pytest.raises(InvalidRequest, match="no image could be fetched"):
        asyncio.run(read(["/1", "/none", "/2"], BodyBudget(1 << 20, "images")))


def test_a_key_has_its_share_of_the_memory() -> None:
    with pytest.raises(RateLimited, match="the images of the requests of the key 'alice'"):
        asyncio.run(read(["/1"], BodyBudget(4 * 2 * PIXELS, "images")))


def reader_of(max_reading: int = 4, fetcher: ImageFetcher | None = None) -> ImageReader:
    fetcher = fetcher or ImageFetcher([], max_bytes=1, timeout_s=1.0)
    return ImageReader(VISION, LIMITS, fetcher, FairThreadPool(2, "test"), max_reading)


def test_what_is_refused_by_heads_has_no_pixels_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "read_image", lambda opened: pytest.fail("pixels were made"))

    def refuse(opened: Sequence[OpenedImage]) -> None:
        raise InvalidRequest(f"{[(each.height, each.width) for each in opened]}")

    async def check() -> None:
        reader, budget = reader_of(), BodyBudget(1 << 20, "images")
        with HeldPixels(budget, "alice") as held, pytest.raises(InvalidRequest, match=r"\[\(24, 32\)\]"):
            await reader.read([ImageInput("p", file=FILES["/0"])], held, "", 1, refuse)
        reader.close()

    asyncio.run(check())


class Noting(HeldPixels):
    """Notes when all of the slow file has come but for its last byte."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        super().__init__(budget, caller)
        self.has_come, self._left = asyncio.Event(), len(FILES["/1"]) - 1

    def charge(self, num_bytes: int) -> None:
        super().charge(num_bytes)
        self._left -= num_bytes
        if self._left == 0:
            self.has_come.set()


class Slow:
    """A server that sends files, but for their last byte, which it keeps until it may."""

    def __init__(self) -> None:
        self.may_end, self.has_begun = asyncio.Event(), asyncio.Semaphore(0)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        file = FILES["/1"]
        head = f"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: {len(file)}\r\n\r\n"
        writer.write(head.encode() + file[:-1])
        self.has_begun.release()
        await self.may_end.wait()
        writer.write(file[-1:])
        writer.close()


@asynccontextmanager
async def slow_site(timeout_s: float = 60.0, max_reading: int = 4) -> AsyncIterator[tuple[Slow, ImageReader, str]]:
    slow = Slow()
    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    async with server:
        place = f"a.example:{server.sockets[0].getsockname()[1]}"
        how = {"resolve": resolve, "is_allowed": lambda address: True}
        fetcher = ImageFetcher([place], max_bytes=LIMITS.file_bytes, timeout_s=timeout_s, **how)  # type: ignore[arg-type]
        reader = reader_of(max_reading, fetcher)
        try:
            yield slow, reader, f"http://{place}/1"
        finally:
            slow.may_end.set()
            reader.close()


def test_a_file_counts_while_it_comes() -> None:
    async def check() -> None:
        budget = BodyBudget(1 << 20, "images")
        async with slow_site() as (slow, reader, url):
            held = Noting(budget, "alice")
            with held:
                reading = asyncio.create_task(reader.read([ImageInput("p", url=url)], held, "alice", 1))
                await slow.has_begun.acquire()
                await held.has_come.wait()
                assert budget.num_bytes == len(FILES["/1"]) - 1
                slow.may_end.set()
                await reading
                assert budget.num_bytes == PIXELS
        assert budget.num_bytes == 0

    asyncio.run(check())


def test_a_file_that_is_too_much_for_the_memory_is_told_as_such_before_it_is_there() -> None:
    async def check() -> None:
        budget = BodyBudget(1000, "images")
        async with slow_site() as (_, reader, url):
            with HeldPixels(budget, "") as held, pytest.raises(Overloaded, match="more than 1000 bytes together"):
                await reader.read([ImageInput("p", url=url)], held, "", 1)
        assert budget.num_bytes == 0

    asyncio.run(check())


def test_one_caller_leaves_places_to_read_for_others() -> None:
    async def check() -> None:
        budget = BodyBudget(1 << 20, "images")
        async with slow_site() as (slow, reader, url):
            with HeldPixels(budget, "alice") as held:
                first = asyncio.create_task(reader.read([ImageInput("p", url=url)], held, "alice", 1))
                await slow.has_begun.acquire()
                sent = [ImageInput("p", file=FILES["/0"])]
                with pytest.raises(RateLimited, match="'alice' already"):
                    await reader.read(sent, held, "alice", 1)
                assert len(await reader.read(sent, held, "bob", 1)) == 1
                slow.may_end.set()
                await first
                assert len(await reader.read(sent, held, "alice", 1)) == 1

    asyncio.run(check())
