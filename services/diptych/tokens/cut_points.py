"""Decides where a text may be cut so that its parts, tokenised one by one, give what the whole gives. Pure.

A tokenizer first takes the added tokens that are not `normalized` out of the raw text; each piece between two of them
is normalised, pre-tokenised and merged without a look at the others. So a cut right before such a token changes
nothing, as long as the token is found there whatever stands before it. It is not when it takes white space on its
left, when it must be a word of its own, or when another token may begin before it and reach into it.
Rule: a tokenizer for which that can't be told has no cut points, and its texts are tokenised whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import tokenizers


def cut_points(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Return what matches the tokens before which a text may be cut; None: nowhere."""
    added = list(backend.get_added_tokens_decoder().values())
    if not _is_local(backend) or any(token.single_word for token in added):
        return None
    raw = [token for token in added if not token.normalized and token.content]
    cuts = {token.content for token in raw if token.special and _stands_alone(token)}
    others = {token.content for token in raw} - cuts
    if not cuts or any(_reaches_into(other, cut) for other in others for cut in cuts):
        return None
    return re.compile("|".join(map(re.escape, _longest_first(cuts))))


def _is_local(backend: tokenizers.Tokenizer) -> bool:
    """Whether nothing depends on the length of the text, or on chance."""
    is_random = bool(getattr(backend.model, "dropout", None))
    return not (is_random or backend.truncation or backend.padding or backend.encode_special_tokens)


def _stands_alone(token: tokenizers.AddedToken) -> bool:
    return not token.lstrip and not token.content[0].isspace()


def _reaches_into(other: str, cut: str) -> bool:
    """Whether `other` may be found where a part of it is (a part of) `cut`."""
    return cut in other or any(other.endswith(cut[:length]) for length in range(1, len(cut)))


def _longest_first(contents: Iterable[str]) -> list[str]:
    """As the tokenizer matches: of two that begin at the same place, the longer one."""
    return sorted(contents, key=len, reverse=True)
