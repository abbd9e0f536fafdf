"""A prompt is segments: token ids, or content (an image, a sound) that a digest names and that takes places of tokens.

A prompt's *keys* say what stands at each of its places, one int64 for each. A token's key is its id. The keys of
content are below zero, and follow from its digest and the place within it; four in a row hold nearly all bits of the
digest. So prompts are named (`page_hash`), compared and cached by their keys, whatever they are made of: a prompt of
tokens alone by its tokens. Rule: a key is the same in every release, because workers and routers compare what is made
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from diptych.common.arrays import I64, U64
from diptych.common.errors import InvalidRequest

DIGEST_BYTES: Final = 32

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
    rgb: bytes = b""  # uint8 [height, width, 3]; empty where nobody encodes it


@dataclass(frozen=True, slots=True)
class ContentSegment:
    """Content in place of tokens."""

    start: int  # its first place in the prompt
    num_tokens: int  # places that it takes, at least 1
    digest: bytes  # SHA-256 of what is encoded: content with the same one shares KV
    image: Image | None = None  # what it is made of

    @property
    def keys(self) -> I64:
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
    if not earliest <= content.start <= latest:
        words = f"content can't start at place {content.start}: those before it leave {earliest} to {latest}"
        raise InvalidRequest(words, param="contents")
