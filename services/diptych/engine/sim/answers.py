"""What a simulated model says, so that whoever knows the prompt knows the only right answer. Pure.

A token leaves a mark in its slot of the KV pool, which follows from its id and its position. The next token follows
from the marks of all tokens before it, each weighed by its place: a page that is missing, stale, of another request or
in another's place gives another answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.common.arrays import I64, U64
from diptych.common.errors import ConfigError
from diptych.tokens.tokenizer import Tokenizer

U32 = npt.NDArray[np.uint32]

MARK: Final = np.uint32(0x0F0F0F0F)  # the bits of a mark: four numbers from 0 to 15, which every type of KV can hold
MEAN_ANSWER_LEN: Final = 256  # tokens; the last one says that it is over

_ODD: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD], np.uint64)  # to multiply by


_WORDS: Final = re.compile(rb"[ A-Za-z0-9]+")


@dataclass(frozen=True, slots=True, eq=False)
class SimVocabulary:
    """Which tokens of a vocabulary a simulated model uses, at least two."""

    ids: I64  # the last one ends an answer

    @property
    def eos_id(self) -> int:
        return int(self.ids[-1])

    def tokens(self, digests: U64) -> I64:
        """Return the tokens that follow `digests`."""
        mixed = _mixed(digests)
        said: I64 = self.ids[mixed % np.uint64(len(self.ids) - 1)]
        said[(mixed >> np.uint64(40)) % np.uint64(MEAN_ANSWER_LEN) == 0] = self.ids[-1]
        return said


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> SimVocabulary:
    """Return the tokens that are words, or parts of some, and the one that ends an answer (or a word, without one)."""
    num_ids = min(vocab_size, tokenizer.vocab_size)
    words = [each for each in range(num_ids) if _WORDS.fullmatch(tokenizer.token_bytes[each])]
    if not words:
        raise ConfigError("--device sim finds no word in the model's vocabulary")
    ends = tokenizer.eos_ids or words
    return SimVocabulary(np.array([*words, ends[0]], np.int64))


def marks(token_ids: I64, positions: I64) -> U32:
    """Return the marks of tokens at their positions."""
    mixed = _mixed(token_ids.astype(np.uint64) * _ODD[0] + positions.astype(np.uint64) * _ODD[1])
    return mixed.astype(np.uint32) & MARK


def digests(seen: U64) -> U64:
    """Return for each token the digest of what was seen up to it; `seen` are a request's marks, in order."""
    return np.cumsum(_weighed(seen, np.arange(len(seen))), dtype=np.uint64)


def expected_tokens(prompt: Sequence[int], max_tokens: int, vocabulary: SimVocabulary) -> list[int]:
    """Return the answer to `prompt`, with the end-of-sequence token if that ends it. It costs O(tokens)."""
    ids = np.array(prompt, np.int64)
    digest = digests(marks(ids, np.arange(len(ids))).astype(np.uint64))[-1:]
    answer: list[int] = []
    while len(answer) < max_tokens and vocabulary.eos_id not in answer[-1:]:
        token, position = vocabulary.tokens(digest), np.array([len(prompt) + len(answer)])
        digest = digest + _weighed(marks(token, position).astype(np.uint64), position)
        answer.append(int(token[0]))
    return answer


def _weighed(seen: U64, positions: I64) -> U64:
    return (seen + np.uint64(1)) * (_mixed(positions.astype(np.uint64)) | np.uint64(1))


def _mixed(values: U64) -> U64:
    """Spread every bit over all (the finalizer of MurmurHash3, shortened)."""
    values = (values + _ODD[1]) * _ODD[2]
    values = (values ^ values >> np.uint64(33)) * _ODD[0]
    return values ^ values >> np.uint64(29)
