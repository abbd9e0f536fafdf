"""Fixtures of the real small model, for every component's tests. It is fetched at the first use."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from diptych.engine.loader import demo
from diptych.engine.loader.source import ModelSource, open_model
from diptych.engine.loader.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def small_model_path() -> Path:
    """SmolLM2-135M-Instruct, one GGUF file."""
    return demo.fetch(lambda what, done, total: None)


@pytest.fixture(scope="session")
def small_model(small_model_path: Path) -> ModelSource:
    """The same file, opened."""
    return open_model("smollm2")


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE of 267 tokens. 0 is `</s>`, which ends a sequence; 1 is `<|x|>`, special too."""
    vocab = {"</s>": 0, "<|x|>": 1}
    for letter in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges = [pair for pair in _PAIRS if vocab.setdefault("".join(pair), len(vocab))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("</s>", "<|x|>")])
    return Tokenizer(backend, eos_ids=(0,), chat_template=None)


_PAIRS = [('"', ":"), ('"', ","), ("{", '"'), ('"', "}"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("1", "2"), ("Ġ", '"')]
