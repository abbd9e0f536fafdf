"""Makes requests of messages that may hold anything: counts what is in them, and decodes large ones in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from google.protobuf.descriptor import ServiceDescriptor

from diptych.router.grpc.message_extent import Extent, check_extent, extent_of, shape_of

SMALL_BYTES: Final = 2**14  # have too little of anything to count it
QUICK_BYTES: Final = 2**18  # are decoded in less than a millisecond,
QUICK: Final = Extent(2**9, 2**9)  # and counted likewise, where they hold no more than that


class MessageReader:
    """Reads the requests of one service.

    One thread, as those that make Python's objects wait for one another, and each holds all that it makes.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        self._shapes = {f"/{service.full_name}/{each.name}": shape_of(each.input_type) for each in service.methods}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="message")

    async def read(self, method: str, decode: Callable[[bytes], Any], message: bytes) -> Any:
        """Return what `decode` makes of a message. Raises `InvalidRequest`, and what `decode` does."""
        if len(message) <= SMALL_BYTES:
            return decode(message)
        shape = self._shapes[method]
        if len(message) <= QUICK_BYTES and extent_of(message, shape, QUICK).is_within(QUICK):
            return decode(message)

        def count_and_decode() -> Any:
            check_extent(message, shape)
            return decode(message)

        return await asyncio.get_running_loop().run_in_executor(self._thread, count_and_decode)
