"""Page memory of this process, and its digest. The memory belongs to the transport that allocated it."""

from __future__ import annotations

import xxhash

from diptych.kvtransfer.errors import PageOutOfRange
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.transport import PageIndices


class HostPool:
    """Pages in host memory. Views of `buffer` must not be touched after the transport was closed."""

    def __init__(self, layout: PoolLayout, buffer: memoryview) -> None:
        self.layout = layout
        self.buffer = buffer

    def digest(self, pages: PageIndices) -> int:
        """Return the xxh3-64 of the bytes of `pages`, in order. Releases the GIL while it hashes."""
        check_pages(pages, self.layout.num_pages)
        page_nbytes = self.layout.page_nbytes
        digest = xxhash.xxh3_64()
        for page in pages.tolist():
            digest.update(self.buffer[page * page_nbytes : (page + 1) * page_nbytes])
        return digest.intdigest()


def check_pages(pages: PageIndices, num_pages: int) -> None:
    """Raise `PageOutOfRange` unless every index names a page of a pool of `num_pages`."""
    outside = pages[(pages < 0) | (pages >= num_pages)]
    if outside.size:
        raise PageOutOfRange(f"page {outside[0]} is not in a pool of {num_pages} pages")
