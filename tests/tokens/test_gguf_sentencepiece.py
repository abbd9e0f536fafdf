"""SentencePiece tokenizers from GGUF metadata, against one that was trained with its merges known."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, trainers

from diptych.tokens import gguf_tokenizer
from diptych.tokens.detokenizer import IncrementalDetokenizer
from diptych.tokens.tokenizer import Tokenizer

TRAINING = [
    "the cat sat on the mat and the rat ran to the other cat",
    "der die das und der andere; hundert Katzen sitzen auf hundert Matten",
    "a, b and c: one two three, four five six",
] * 5
TEXTS = [
    "the mat",
    " the  cat sat, and ran ",
    "Katzen und the rat",
    "hundred matters — naïve 😀 text\nwith lines\t",
    "",
    "x",
    "<s>the cat</s>",
]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
WHOLE = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """As published tokenizers of Llama 2 are built; every byte has a token."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    whole = [*WHOLE, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=420, special_tokens=whole, show_progress=False, max_token_length=8)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(scope="module")
def metadata(trained: tokenizers.Tokenizer) -> dict[str, Any]:
    vocab = trained.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [WHOLE.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [-float(i) if kind == NORMAL else 0.0 for i, kind in enumerate(types)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@pytest.fixture
def built(metadata: dict[str, Any]) -> Tokenizer:
    return gguf_tokenizer.build(metadata, (2,))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_tokens_of_the_original_and_back(
    built: Tokenizer, trained: tokenizers.Tokenizer, text: str
) -> None:
    ids = built.encode(text)
    assert ids == trained.encode(text, add_special_tokens=False).ids
    assert built.decode(ids, skip_special_tokens=False) == trained.decode(ids, skip_special_tokens=False)


def test_pieces_are_merged(built: Tokenizer, metadata: dict[str, Any]) -> None:
    assert [metadata["tokenizer.ggml.tokens"][i] for i in built.encode("the cat")] == ["▁the▁", "c", "at"]


def test_bos_comes_first_when_asked_for(built: Tokenizer) -> None:
    assert built.encode("the", add_special_tokens=True) == [1, *built.encode("the")]


def test_text_in_pieces_is_the_text_in_one(built: Tokenizer) -> None:
    ids = built.encode("the cat sat 😀 on the mat")
    stream = IncrementalDetokenizer(built)
    assert "".join([*(stream.push([token]) for token in ids), stream.flush()]) == "the cat sat 😀 on the mat"


def test_a_file_may_want_no_space_in_front(metadata: dict[str, Any]) -> None:
    without = gguf_tokenizer.build(metadata | {"tokenizer.ggml.add_space_prefix": False}, (2,))
    ids = without.encode("the cat")
    assert metadata["tokenizer.ggml.tokens"][ids[0]] == "th"
    assert without.decode(ids) == "the cat"
    assert without.decode(without.encode(" cat")) == " cat"
