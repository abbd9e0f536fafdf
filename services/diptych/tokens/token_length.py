"""How few tokens a text may have, told by its length: one that is far too long needs no other look. Pure.

Rule: only where it is known which bytes are in some token. A normaliser may drop characters, an unknown token may stand
for any number of them, and so may an added token that takes the white space beside it: then nothing is told. A
vocabulary that lacks some control characters drops them; of every other character at least its last byte is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers import models

from diptych.tokens.token_bytes import byte_alphabet

KEEPING: Final = frozenset({"ByteLevel", "Digits", "Split"})  # pre-tokenizers; a split that removes is none of them
ASCII: Final = 0x80
LAST_BYTES: Final = range(0x80, 0xC0)  # of all other characters in UTF-8


@dataclass(frozen=True, slots=True)
class TokenLength:
    """Of one vocabulary."""

    longest: int  # bytes of a token
    dropped: str  # characters that are in none

    def least_tokens(self, text: str) -> int:
        """Return what a text has at least. No character has less than a byte."""
        num_kept = len(text) - sum(map(text.count, self.dropped))
        return -(-num_kept // self.longest)


def token_length(backend: tokenizers.Tokenizer) -> TokenLength | None:
    """Return what can be told; None where nothing can."""
    if backend.normalizer is not None or backend.truncation or not isinstance(backend.model, models.BPE):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    if backend.model.unk_token or not _keeps_bytes(backend) or any(token.lstrip or token.rstrip for token in added):
        return None
    pieces = backend.get_vocab(with_added_tokens=False)
    missing = {byte for char, byte in byte_alphabet().items() if char not in pieces}
    if not missing.isdisjoint(LAST_BYTES):
        return None
    longest = max(*map(len, pieces), *(len(token.content.encode()) for token in added))
    return TokenLength(longest, "".join(chr(byte) for byte in sorted(missing) if byte < ASCII))


def _keeps_bytes(backend: tokenizers.Tokenizer) -> bool:
    steps = list(_steps(json.loads(backend.pre_tokenizer.__getstate__()))) if backend.pre_tokenizer else []
    kinds = {step["type"] for step in steps}
    return "ByteLevel" in kinds <= KEEPING and all(step.get("behavior") != "Removed" for step in steps)


def _steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for each in step["pretokenizers"]:
            yield from _steps(each)
    else:
        yield step
