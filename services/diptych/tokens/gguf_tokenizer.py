"""Rebuilds a tokenizer from GGUF metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not contain it; the ones known here are llama.cpp's.

SentencePiece always merges the two neighbours whose whole has the best score. A list of merges says the same: for each
piece, in the order of the scores, every two pieces that make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from diptych.common.errors import ConfigError, DiptychError
from diptych.tokens.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # token types
MAX_TOKEN_CHARS: Final = 1024  # pieces are cut at each place
LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Final = {"llama-bpe": LLAMA3_SPLIT, "qwen2": LLAMA3_SPLIT.replace("{1,3}", "")}
SPACE: Final = "\u2581"


def build(metadata: Mapping[str, Any], eos_ids: tuple[int, ...]) -> Tokenizer:
    """Build the tokenizer that the metadata describes. Raises `ConfigError` for a kind that is not known."""
    kind = str(metadata.get("tokenizer.ggml.model"))
    if kind not in KINDS:
        raise ConfigError(f"GGUF tokenizer {kind!r} is not supported; {' and '.join(KINDS)} are")
    try:
        return _build(kind, metadata, eos_ids)
    except DiptychError:
        raise
    except Exception as error:  # of the library, whose own errors have no class of their own
        raise ConfigError(f"the GGUF tokenizer makes no sense: {error!r:.500}") from None


def _build(kind: str, metadata: Mapping[str, Any], eos_ids: tuple[int, ...]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise ConfigError(f"a GGUF token has more than {MAX_TOKEN_CHARS} characters")
    backend = KINDS[kind](metadata)
    _add_whole_tokens(backend, tokens, metadata["tokenizer.ggml.token_type"])
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    has_habit = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    if bos_id is not None and metadata.get("tokenizer.ggml.add_bos_token", has_habit):
        bos = tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    template = metadata.get("tokenizer.chat_template")
    special_tokens = _special_tokens(metadata, tokens)
    return Tokenizer(backend, eos_ids=eos_ids, chat_template=template, special_tokens=special_tokens)


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])
    backend = tokenizers.Tokenizer(models.BPE(vocab, [(left, right) for left, _, right in merges]))
    backend.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ConfigError(f"GGUF pre-tokenizer {name!r} is not supported; default, gpt-2, smollm, {', '.join(SPLITS)} are")


def _add_whole_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    backend.add_special_tokens([AddedToken(token, special=True) for token, kind in whole if kind == CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in whole if kind == USER_DEFINED])


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """As templates name them."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_id") for name in ("bos_token", "eos_token")}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


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


KINDS: Final[Mapping[str, Callable[[Mapping[str, Any]], tokenizers.Tokenizer]]] = {
    "gpt2": _byte_level,
    "llama": sentencepiece,
}
