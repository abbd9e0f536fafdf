"""Reads the images of requests: fetched, decoded and scaled, in threads of their own, within bounds.

Rule: a request without images never waits here, nor for anything that images hold: they have their own threads, and so
few requests read images at once that places to run are left for others; of one caller a quarter of these. What images
take of the memory is counted: files as they come, until their pixels are made, and pixels to the end of their request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from diptych.architectures.vision import VisionInput
from diptych.common.errors import InvalidRequest
from diptych.router.admission.held_pixels import HeldPixels
from diptych.router.images.decode import OpenedImage, ReadImage, open_image, read_image
from diptych.router.images.fetch import ImageFetcher
from diptych.router.images.limits import CHANNELS, PIXELS_TOGETHER, ImageLimits
from diptych.router.images.turns import Places
from diptych.router.text.fair_threads import FairThreadPool
from diptych.router.values.images import ImageInput

T = TypeVar("T")


class ImageReader:
    """Makes of images as clients give them what a model is shown. Used from one event loop; `close` it."""

    def __init__(
        self, vision: VisionInput, limits: ImageLimits, fetcher: ImageFetcher, threads: FairThreadPool, max_reading: int
    ) -> None:
        """`max_reading` requests have images read at once; more are refused."""
        self.vision = vision
        self._limits = limits
        self._fetcher = fetcher
        self._threads = threads
        self._places = Places(max_reading, "images are being read")

    def close(self) -> None:
        self._fetcher.close()
        self._threads.close()

    def check(self, images: Sequence[ImageInput]) -> None:
        """Raise `InvalidRequest` for what a look at them tells."""
        if len(images) > self._limits.num_images:
            words = f"a request may have {self._limits.num_images} images, not {len(images)}"
            raise InvalidRequest(words, param=images[0].param)
        for image in images:
            self._fetcher.check(image)

    async def read(
        self,
        images: Sequence[ImageInput],
        held: HeldPixels,
        tenant: str,
        num_copies: int,
        check: Callable[[Sequence[OpenedImage]], None] = lambda opened: None,
    ) -> list[ReadImage]:
        """Return their pixels, in order. `num_copies` of them are sent; `check` may refuse them before they are made.

        Raises the caller's `DiptychError`.
        """
        with self._places.take(tenant):
            files = await self._files(images, held, tenant)
            opened = [await self._open(each, file, tenant) for each, file in zip(images, files, strict=True)]
            check(opened)
            held.charge(self._bytes_together(opened, num_copies))
            read = [await self._run(partial(read_image, each), tenant, each.num_steps) for each in opened]
            held.give_back(sum(len(file) for image, file in zip(images, files, strict=True) if image.url))
            return read

    async def _files(self, images: Sequence[ImageInput], held: HeldPixels, tenant: str) -> list[bytes | str]:
        """Fetch what is elsewhere, all at once. The first that fails ends it."""
        if not any(image.url for image in images):
            return [image.file for image in images]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._file(image, held, tenant)) for image in images]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _file(self, image: ImageInput, held: HeldPixels, tenant: str) -> bytes | str:
        return await self._fetcher.fetch(image, tenant, held.charge) if image.url else image.file

    async def _open(self, image: ImageInput, file: bytes | str, tenant: str) -> OpenedImage:
        return await self._run(partial(open_image, image, file, self.vision, self._limits), tenant, len(file))

    async def _run(self, work: Callable[[], T], tenant: str, num_steps: int) -> T:
        return await self._threads.run(work, tenant, num_steps)

    def _bytes_together(self, opened: Sequence[OpenedImage], num_copies: int) -> int:
        """Raises `InvalidRequest`."""
        num_pixels, most = sum(each.height * each.width for each in opened), self._limits.request_bytes
        if num_pixels > PIXELS_TOGETHER:
            words = f"the images of a prompt have {num_pixels} pixels together, scaled as the model takes them"
            raise InvalidRequest(f"{words}: at most {PIXELS_TOGETHER} are taken, so send fewer", param=opened[0].param)
        num_bytes = num_copies * CHANNELS * num_pixels
        if num_bytes > most:
            words = (
                f"the pixels of {num_copies} outputs take {num_bytes} bytes, more than {most}: ask for fewer outputs"
            )
            raise InvalidRequest(words, param="n")
        return num_bytes
