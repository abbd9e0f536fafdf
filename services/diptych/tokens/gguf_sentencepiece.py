"""Rebuilds a SentencePiece BPE tokenizer ("llama" in GGUF) from its pieces and their scores.

SentencePiece always merges the two neighbours whose whole has the best score. A list of merges says the same: for each
piece, in the order of the scores, every two pieces that make it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers

SPACE: Final = "\u2581"


def sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer without its special tokens."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    by_score = sorted(range(len(tokens)), key=lambda index: -scores[index])
    merges = [pair for index in by_score for pair in _pairs(tokens[index], vocab)]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    starts_with_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if starts_with_space else spaces)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if starts_with_space else decoding)
    return backend


def _pairs(piece: str, vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for at in range(1, len(piece)):
        left, right = piece[:at], piece[at:]
        if left in vocab and right in vocab:
            yield left, right
