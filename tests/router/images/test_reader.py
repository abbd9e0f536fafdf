"""Images of a request are read together, in order, and what they take is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from pictures import LIMITS, VISION, file_of, picture

from diptych.common.errors import InvalidRequest
from diptych.router.admission.body_budget import BodyBudget
from diptych.router.admission.held_pixels import HeldPixels
from diptych.router.errors import RateLimited
from diptych.router.images.decode import open_image, read_image
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
            [place], max_bytes=LIMITS.file_bytes, timeout_s=30.0, resolve=resolve, is_allowed=lambda address: True
        )
        reader = ImageReader(VISION, LIMITS, fetcher, FairThreadPool(2, "test"), 1)
        images = [ImageInput("p", file=FILES["/0"]), *(ImageInput("p", url=f"http://{place}{path}") for path in paths)]
        try:
            with HeldPixels(budget, "alice") as held:
                found = await reader.read(images, held, "", num_copies)
                wanted = sum(len(FILES[path]) for path in paths) + num_copies * PIXELS * len(images)
                assert budget.num_bytes == wanted
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
