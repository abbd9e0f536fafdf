"""Prompts to tokens. What was tokenised before, the earlier turns of a conversation say, is not tokenised again.

Prompts are cut where that does not change their tokens (see `cut_points`); each segment's tokens are remembered.
Tokens stay packed: a list of them takes ten times the memory, and as many steps as there are tokens to make.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from re import Pattern
from typing import Final

from diptych.tokens.packed_tokens import TOKEN_BYTES, TOKEN_TYPE, pack
from diptych.tokens.segment_cache import SegmentCache
from diptych.tokens.tokenizer import Tokenizer

PROBE: Final = "a"  # any text that has tokens
QUICK_CHARS: Final = 256 * 1024  # to look for cuts in: a millisecond
QUICK_SEGMENTS: Final = 4096  # to look up and join: likewise
CHARS_PER_TOKEN: Final = 8  # that a text has to have to be looked at as a whole: usual ones have three to five
CUT_TOKENS: Final = 64  # that a cut within a word, or a special token, may add


class PromptEncoder:
    """Tokenises prompts for one tokenizer. Safe between threads; a long prompt lets other threads run."""

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._frame = _frame(tokenizer)
        self._cuts = tokenizer.cut_points() if cache_bytes and self._frame else None
        self._length = tokenizer.token_length()
        self._cut_tokens = max(CUT_TOKENS, tokenizer.longest_word())  # a word that is cut may be known by its beginning
        self.cache = SegmentCache(cache_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = False, namespace: bytes = b"") -> array[int]:
        """Return exactly what the tokenizer makes of the text. Raises `InvalidRequest` if it is not valid Unicode.

        What is remembered is found again in the same `namespace` only.
        """
        ids = self._encode(text, len(text), len(text), add_special_tokens, namespace)
        assert ids is not None, "no part is longer than the whole"
        return ids

    def cut(self, ids: array[int], most: int, *, keeps_end: bool, is_framed: bool) -> array[int]:
        """Return at most so many of the tokens of a text, from its beginning or up to its end.

        What the tokenizer has put around the text, if it `is_framed`, stays there.
        """
        before, behind = self._frame_lens() if is_framed else (0, 0)
        if len(ids) <= most:
            return ids
        room, text = max(0, most - before - behind), ids[before : len(ids) - behind]
        kept = text[len(text) - room :] if keeps_end else text[:room]
        return (ids[:before] + kept + ids[len(ids) - behind :])[:most]

    def _frame_lens(self) -> tuple[int, int]:
        if self._frame is None:
            return 0, 0
        return len(self._frame.before) // TOKEN_BYTES, len(self._frame.behind) // TOKEN_BYTES

    def has_more_than(self, max_tokens: int, text: str) -> bool:
        """Whether a text certainly has more tokens, told by its length, or by its beginning.

        As many steps as `max_tokens` take, however long the text. Raises `InvalidRequest` if it looks at what is no
        valid Unicode.
        """
        if self._length is not None and self._length.least_tokens(text) > max_tokens:
            return True
        num_chars = CHARS_PER_TOKEN * max_tokens
        while num_chars < len(text):
            if len(self._tokenizer.encode(text[:num_chars])) > max_tokens + self._cut_tokens:
                return True
            num_chars *= 2
        return False

    def encode_known(
        self, text: str, max_new_chars: int, *, add_special_tokens: bool = False, namespace: bytes = b""
    ) -> array[int] | None:
        """The same where it is quick: all but so many characters have been seen before, in a few pieces; else None."""
        if len(text) > QUICK_CHARS:
            return None
        return self._encode(text, max_new_chars, QUICK_SEGMENTS, add_special_tokens, namespace)

    def _encode(
        self, text: str, max_new_chars: int, max_segments: int, add_special_tokens: bool, namespace: bytes
    ) -> array[int] | None:
        if self._cuts is None or self._frame is None:
            if len(text) > max_new_chars:
                return None
            return array(TOKEN_TYPE, self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        segments = _cut(text, self._cuts, max_segments)
        if len(segments) > max_segments:
            return None
        found = self.cache.find(segments, namespace)
        new = list(dict.fromkeys(segment for segment, ids in zip(segments, found, strict=True) if ids is None))
        new_chars = sum(map(len, new))
        if new_chars > max_new_chars:
            return None
        self.cache.count(len(text) - new_chars, new_chars)
        ids = b"".join(self._fill(segments, found, new, namespace))
        if add_special_tokens:
            ids = self._frame.before + ids + self._frame.behind
        return array(TOKEN_TYPE, ids)

    def _fill(
        self, segments: Sequence[str], found: Sequence[bytes | None], new: Sequence[str], namespace: bytes
    ) -> Iterable[bytes]:
        """Make tokens of the segments that are new; return those of all."""
        encoded = self._tokenizer.encode_all(new) if new else []
        fresh = {segment: pack(ids) for segment, ids in zip(new, encoded, strict=True)}
        self.cache.add(fresh, namespace)
        return [fresh[segment] if ids is None else ids for segment, ids in zip(segments, found, strict=True)]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Packed tokens that a tokenizer puts around a text, where it is asked for special tokens."""

    before: bytes
    behind: bytes


def _frame(tokenizer: Tokenizer) -> _Frame | None:
    """Return None where it does more than to put tokens around the text."""
    bare, framed = tokenizer.encode(PROBE), tokenizer.encode(PROBE, add_special_tokens=True)
    for start in range(len(framed) - len(bare) + 1):
        if bare and framed[start : start + len(bare)] == bare:
            return _Frame(pack(framed[:start]), pack(framed[start + len(bare) :]))
    return None


def _cut(text: str, cuts: Pattern[str], max_segments: int) -> list[str]:
    """Return all segments, or if that would be too many, not all but too many."""
    starts = [match.start() for match in islice(cuts.finditer(text), max_segments + 1)]
    bounds = [0, *starts, len(text)]
    return [text[start:end] for start, end in pairwise(bounds) if start < end]
