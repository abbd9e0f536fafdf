"""Rebuilds a byte-level BPE tokenizer from GGUF metadata.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not contain it; the ones known here are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from diptych.common.errors import ConfigError
from diptych.engine.loader.chat_template import ChatTemplate
from diptych.engine.loader.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # token types
LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Final = {"llama-bpe": LLAMA3_SPLIT, "qwen2": LLAMA3_SPLIT.replace("{1,3}", "")}


def build(metadata: Mapping[str, Any], eos_ids: tuple[int, ...]) -> Tokenizer:
    """Build the tokenizer that the metadata describes. Raises `ConfigError` for a kind that is not known."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(f"GGUF tokenizer {metadata.get('tokenizer.ggml.model')!r} is not supported; gpt2 (BPE) is")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    backend = tokenizers.Tokenizer(_bpe(tokens, metadata["tokenizer.ggml.merges"]))
    pre = metadata.get("tokenizer.ggml.pre", "default")
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    _add_whole_tokens(backend, tokens, metadata["tokenizer.ggml.token_type"])
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return Tokenizer(backend, eos_ids=eos_ids, chat_template=_chat_template(metadata, tokens))


def _bpe(tokens: list[str], merges: list[str]) -> models.BPE:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    return models.BPE(vocab, pairs)


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


def _chat_template(metadata: Mapping[str, Any], tokens: list[str]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_id") for name in ("bos_token", "eos_token")}
    return ChatTemplate(source, {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None})
