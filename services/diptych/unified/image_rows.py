"""Rows of images between workers: made at an encode worker, pulled by who computes the prompt, read by its steps.

Rows are a cached prefix in a namespace of their own (`generation/image_rows`). To encode an image is to compute such a
prefix; to pull it, verify it and evict it is what `Pulling`, `Lending` and the tree do with any. Rule: nobody depends
on an encode worker. What does not come, or comes too late, is encoded where the prompt is computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from diptych.common.arrays import I64
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.cache.peer_pages import Lent, PeerPages
from diptych.engine.schedule.admission import refuse_image
from diptych.engine.values.batch import ForwardBatch, ImageRows
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request, new_request
from diptych.generation.image_rows import row_keys, row_namespace
from diptych.generation.segments import ContentSegment, are_computable


class RowPages:
    """The rows of images in the pages of one cache."""

    def __init__(self, cache: KvCache, limits: Limits, page_nbytes: int) -> None:
        self._cache = cache
        self._limits = limits
        self._page_nbytes = page_nbytes
        self._pages = PeerPages(cache)
        self._read: deque[list[Lent]] = deque()  # by steps that are launched, where it can carry rows
        self.can_carry = self._limits.image_row_nbytes > 0  # not without a tower, nor on several ranks

    def keys(self, content: ContentSegment) -> I64:
        """Return what stands for the rows of an image."""
        row_nbytes, page_size = self._limits.image_row_nbytes, self._cache.page_size
        return row_keys(content.digest, content.num_tokens, row_nbytes, self._page_nbytes, page_size)

    def _namespace(self, extra_key: bytes) -> bytes:
        return row_namespace(extra_key, self._limits.image_row_dtype)

    # at an encode worker

    def refuse(self, request: Request) -> str | None:
        """Say why the image of a leg can't be encoded here; None when it can."""
        if not self.can_carry or self._limits.vision is None:
            return "this worker encodes no images: its model has no tower, or it has several ranks"
        if len(request.contents) != 1 or not are_computable(request.contents):
            return "a leg of kind encode has one image, with its pixels (rgb)"
        if (problem := refuse_image(request.contents[0], self._limits.vision)) is not None:
            return problem
        num_tokens = len(self.keys(request.contents[0]))
        if num_tokens > self._limits.max_whole_tokens:
            words = f"the rows of the image take pages for {num_tokens} tokens, and a step of this worker has"
            return f"{words} {self._limits.max_whole_tokens} at most (see --max-step-tokens)"
        return None

    def encoding(self, request: Request) -> Request:
        """Return the request that computes the rows of a leg's image: one step, into pages of its own."""
        (content,) = request.contents
        namespace = self._namespace(request.extra_key)
        found = new_request(
            request.room,
            self.keys(content),
            replace(request.params, max_tokens=1),
            account=request.account,
            hints=request.hints,
            life=request.life,
            slo=request.slo,
            extra_key=namespace,
        )
        found.encodes, found.is_whole = content, True
        return found

    # where the prompt is computed

    def wanted(self, request: Request) -> list[tuple[ContentSegment, I64, bytes]]:
        """Return the images whose rows another worker has and this one lacks, with their keys and namespace."""
        if not self.can_carry or not request.contents:
            return []
        found, start = [], self._cache.cached_len(request)
        for content in request.contents:
            if content.encoder and content.image is not None and content.end > start:
                keys, namespace = self.keys(content), self._namespace(request.extra_key)
                if self._cache.tree.peek(keys, namespace) < len(keys):
                    found.append((content, keys, namespace))
        return found

    def begin_step(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the step with the pages of rows that are here, which stay until its end. Each is ended, in order."""
        lent: list[Lent] = []
        self._read.append(lent)
        if not batch.images or not self.can_carry:
            return batch
        return replace(batch, images=tuple(self._with_pages(each, lent) for each in batch.images))

    def _with_pages(self, image: ImageRows, lent: list[Lent]) -> ImageRows:
        assert self._limits.vision is not None
        extra_key, digest = image.key[:-32], image.key[-32:]
        num_places = self._limits.vision.tokens_of(image.image.height, image.image.width)
        keys = self.keys(ContentSegment(0, num_places, digest))
        found = self._pages.lend(keys, self._namespace(extra_key), 0)
        if found is None:
            return image
        lent.append(found)
        is_whole = found.num_pages == len(keys) // self._cache.page_size
        return replace(image, pages=found.pages.copy()) if is_whole else image

    def end_step(self) -> None:
        """The step that was begun first has read what it wanted."""
        for each in self._read.popleft():
            self._pages.take_back(each)

    def undo_step(self) -> None:
        """The step that was begun last is not computed."""
        for each in self._read.pop():
            self._pages.take_back(each)
