"""A prompt is segments: token ids, or content (an image, rows of numbers) that is named and takes places of tokens.

A prompt's *keys* say what stands at each of its places, one int64 for each. A token's key is its id. The keys of
content are below zero, and follow from its digest and the place within it; four in a row hold nearly all bits of the
digest. Rows have names of their own, each a key (`embed_rows`). So prompts are named (`page_hash`), compared and cached
by their keys, whatever they are made of: a prompt of tokens alone by its tokens. Rule: a key is the same in every
release, because workers and routers compare what is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import F32, I64, U64
from diptych.common.errors import InvalidRequest
from diptych.generation.embed_rows import NUMBER_BYTES, EmbedRows, named, to_bytes

DIGEST_BYTES: Final = 32
CHANNELS: Final = 3  # of a pixel, a byte each

_BELOW_ZERO: Final = np.uint64(1 << 63)
_PLACE_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, as every multiplier here
_LENGTH_STEP: Final = 0xC2B2AE3D27D4EB4F


@dataclass(frozen=True, slots=True, eq=False)
class TokenSegment:
    """Tokens."""

    token_ids: I64

    @property
    def keys(self) -> I64:
        return self.token_ids


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a model's encoder is to see it: scaled already, not normalised."""

    height: int  # pixels
    width: int
    rgb: bytes = field(default=b"", repr=False)  # uint8 [height, width, 3]; empty where nobody encodes it


@dataclass(frozen=True, slots=True)
class ContentSegment:
    """Content in place of tokens."""

    start: int  # its first place in the prompt
    num_tokens: int  # places that it takes, at least 1
    digest: bytes  # SHA-256 of what is encoded: content with the same one shares KV
    image: Image | None = None  # what it is made of
    encoder: int = 0  # instance that has its rows, to be pulled; 0: nobody, as far as is known
    rows: EmbedRows | None = None  # what it is made of, if it is no image

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_computable(self) -> bool:
        """Whether all of it is here: pixels, or numbers."""
        return bool(self.rows.data) if self.rows is not None else self.image is not None and bool(self.image.rgb)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of an image's places, `num_tokens` together; (0, 0): it is none, or no whole number of them.

        They are squares, so how many pixels one has follows from how many there are.
        """
        if self.image is None or self.image.height < 1 or self.image.width < 1:
            return 0, 0
        side = math.isqrt(self.image.height * self.image.width // self.num_tokens)
        rows, columns = (self.image.height // side, self.image.width // side) if side else (0, 0)
        return (rows, columns) if rows * columns == self.num_tokens else (0, 0)

    @property
    def keys(self) -> I64:
        if self.rows is not None:
            return self.rows.keys
        words = np.frombuffer(self.digest, "<u8").astype(np.uint64)
        places = np.arange(self.num_tokens, dtype=np.uint64)
        length = np.uint64(self.num_tokens * _LENGTH_STEP % 2**64)
        mixed: U64 = words[places % np.uint64(len(words))] + places * _PLACE_STEP + length | _BELOW_ZERO
        return mixed.view(np.int64)


class ContentSpan(Protocol):
    """Content, here or on the wire."""

    @property
    def num_tokens(self) -> int: ...


Segment = TokenSegment | ContentSegment


def segments(token_ids: I64, contents: Sequence[ContentSegment]) -> Iterator[Segment]:
    """Yield the segments of a prompt, given its tokens and, in order, what stands between them.

    Raises `InvalidRequest` for contents that cannot stand there.
    """
    start = used = 0
    for content in contents:
        _check(content, start, start + len(token_ids) - used)
        count = content.start - start
        if count:
            yield TokenSegment(token_ids[used : used + count])
        yield content
        start, used = content.start + content.num_tokens, used + count
    if used < len(token_ids):
        yield TokenSegment(token_ids[used:])


def prompt_keys(token_ids: I64, contents: Sequence[ContentSegment] = ()) -> I64:
    """Return what stands at each place of a prompt. Raises `InvalidRequest` as `segments` does."""
    return np.concatenate([each.keys for each in segments(token_ids, contents)]) if contents else token_ids


def content_of_rows(rows: F32) -> ContentSegment:
    """Return the content of a prompt that is rows `[num_rows, width]`, at least one, and nothing else."""
    return content_of_row_bytes(to_bytes(rows), rows.shape[1])


def content_of_row_bytes(data: bytes, width: int) -> ContentSegment:
    """The same of `[num_rows, width]` in little-endian float32, which is kept and not copied."""
    found, digest = named(data, width)
    return ContentSegment(0, len(data) // (NUMBER_BYTES * width), digest, rows=found)


def without_pixels(content: ContentSegment) -> ContentSegment:
    """Return the same for whoever computes nothing of it: positions follow from its size, and keys from names."""
    if content.rows is not None:
        return replace(content, rows=replace(content.rows, data=b""))
    image = content.image
    return content if image is None else replace(content, image=Image(image.height, image.width))


def are_computable(contents: Iterable[ContentSegment]) -> bool:
    """Whether a prompt can be computed here: of an image, a worker that was sent its KV has the size alone."""
    return all(each.is_computable for each in contents)


def content_len(contents: Sequence[ContentSpan]) -> int:
    """Return how many places contents take."""
    return sum(content.num_tokens for content in contents) if contents else 0


def _check(content: ContentSegment, earliest: int, latest: int) -> None:
    if len(content.digest) != DIGEST_BYTES:
        raise InvalidRequest(
            f"content has a digest of {DIGEST_BYTES} bytes, not {len(content.digest)}", param="contents"
        )
    if content.num_tokens < 1:
        raise InvalidRequest("content takes at least one place of the prompt", param="contents")
    if content.rows is not None:
        content.rows.check(content.num_tokens)
    if not earliest <= content.start <= latest:
        words = f"content can't start at place {content.start}: those before it leave {earliest} to {latest}"
        raise InvalidRequest(words, param="contents")


def rope_shift(contents: Iterable[ContentSegment]) -> int:
    """Return what is added to a token's place, behind these contents, for its position of time, height and width.

    An image's rows and columns are counted from the position of its first place on; what follows comes behind the
    longer side. Nothing but sizes is asked, so whoever goes on with a prompt knows it without pixels.
    """
    return sum(max(content.grid) - content.num_tokens for content in contents if max(content.grid))


def rope_positions(contents: Sequence[ContentSegment], start: int, end: int) -> I64:
    """Return positions of time, height and width of the places `[start, end)` of a request, `[3, end - start]`."""
    places = np.arange(start, end, dtype=np.int64)
    found: I64 = np.broadcast_to(places, (3, len(places))).copy()
    for content in contents:
        rows, columns = content.grid
        if not rows or content.start >= end:
            continue
        behind = max(0, content.end - start)
        inside = slice(max(0, content.start - start), behind)
        found[:, behind:] += max(rows, columns) - content.num_tokens
        first = found[0, inside] - (places[inside] - content.start)  # what is before it is counted already
        numbers = places[inside] - content.start
        found[:, inside] = first + np.stack((np.zeros_like(numbers), numbers // columns, numbers % columns))
    return found
