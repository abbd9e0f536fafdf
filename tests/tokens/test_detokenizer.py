from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from diptych.tokens.detokenizer import Decoder, IncrementalDetokenizer

EOS = "<|end|>"
TEXTS = {
    "ascii": "Hello, world! The quick brown fox.",
    "emoji": "a 😀👩‍👩‍👧🏳️‍🌈 b",
    "cjk": "漢字とかな 한국어",
    "combining marks": "e\u0301 n\u0303 ç",
    "real replacement characters": "\ufffd a \ufffd\ufffd\ufffd\ufffd b\ufffd",
    "spaces": "  two  spaces\n\n\ttab ",
}


def byte_level() -> Tokenizer:
    """A byte-level BPE like those of most models: a token is a run of bytes, not of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[EOS], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox says hello, 漢字 and 😀"], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a mark for the space before them, and one token a byte for all else, as in SentencePiece models."""
    words = ["▁", "▁Hello", "Hello", "▁a", "b", ",", "▁world"]
    vocab = {token: index for index, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def token_id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    assert found is not None
    return found


def byte_ids(data: bytes) -> list[int]:
    """One token a byte: each character is split as far as it can be."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [token_id(BYTE_LEVEL, names[byte]) for byte in data]


def fallback_ids(data: bytes) -> list[int]:
    return [token_id(BYTE_FALLBACK, f"<0x{byte:02X}>") for byte in data]


def streamed(tokenizer: Decoder, pieces: Sequence[Sequence[int]]) -> list[str]:
    """Return what each push showed, and what the flush did."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[token] for token in ids]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("split", [lambda text: BYTE_LEVEL.encode(text).ids, lambda text: byte_ids(text.encode())])
def test_streamed_text_is_the_text(text: str, split: Callable[[str], list[int]]) -> None:
    assert "".join(streamed(BYTE_LEVEL, one_by_one(split(text)))) == text
    assert streamed(BYTE_LEVEL, [split(text)])[0] == text.removesuffix("\ufffd")


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    ids = byte_ids("é漢😀!".encode())
    assert streamed(BYTE_LEVEL, one_by_one(ids)) == ["", "é", "", "", "漢", "", "", "", "😀", "!", ""]


def test_bytes_that_end_within_a_character_are_shown_as_broken_at_the_end() -> None:
    ids = byte_ids(b"ok" + "😀".encode()[:3])
    assert streamed(BYTE_LEVEL, one_by_one(ids)) == ["o", "k", "", "", "", "\ufffd"]


def test_a_broken_character_is_shown_once_the_next_one_proves_it() -> None:
    ids = byte_ids(b"\xf0\x9fa")
    assert streamed(BYTE_LEVEL, one_by_one(ids)) == ["", "", "\ufffda", ""]


@pytest.mark.parametrize("num_broken", range(10, 20))
def test_text_after_many_broken_characters_is_shown_once(num_broken: int) -> None:
    space_and_half_a_face, other_half = token_id(BYTE_LEVEL, "ĠðŁ"), token_id(BYTE_LEVEL, "ĺĢ")
    ids = [*byte_ids(b"\xff" * num_broken), space_and_half_a_face, other_half]
    assert "".join(streamed(BYTE_LEVEL, one_by_one(ids))) == "\ufffd" * num_broken + " 😀"


def test_special_tokens_have_no_text_and_do_not_break_characters() -> None:
    eos = token_id(BYTE_LEVEL, EOS)
    first, *rest = byte_ids("é!".encode())
    assert streamed(BYTE_LEVEL, one_by_one([eos, first, eos, eos, *rest, eos])) == ["", "", "", "", "é", "!", "", ""]


def test_nothing_pushed_shows_nothing() -> None:
    assert streamed(BYTE_LEVEL, []) == [""]
    assert streamed(BYTE_LEVEL, [[], byte_ids(b"\xc3"), [], byte_ids(b"\xa9"), []])[3] == "é"


def test_a_flushed_detokenizer_starts_anew() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    for _ in range(2):
        assert detokenizer.push(byte_ids(b"a\xc3")) == "a"
        assert detokenizer.flush() == "\ufffd"


def test_only_the_first_space_of_a_text_is_stripped() -> None:
    names = ["▁Hello", ",", "▁world", "▁", "▁a"]
    ids = [token_id(BYTE_FALLBACK, name) for name in names]
    assert streamed(BYTE_FALLBACK, one_by_one(ids)) == ["Hello", ",", " world", " ", " a", ""]


def test_a_lone_space_at_the_start_is_the_one_that_is_stripped() -> None:
    ids = [token_id(BYTE_FALLBACK, name) for name in ["▁", "▁a"]]
    assert streamed(BYTE_FALLBACK, one_by_one(ids)) == ["", " a", ""]


def test_byte_fallback_characters_are_shown_when_whole() -> None:
    ids = [token_id(BYTE_FALLBACK, "▁a"), *fallback_ids("😀é".encode()), token_id(BYTE_FALLBACK, "b")]
    assert streamed(BYTE_FALLBACK, one_by_one(ids)) == ["a", "", "", "", "😀", "", "é", "b", ""]


any_pieces = st.lists(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=8), max_size=12)
broken_ids = st.lists(st.binary(min_size=1, max_size=1), max_size=60).map(lambda data: byte_ids(b"".join(data)))
no_bytes = st.sampled_from([*range(7), token_id(BYTE_FALLBACK, EOS)]).map(lambda token: [token])
fallback_pieces = st.lists(no_bytes | st.sampled_from("é漢😀\u0301").map(lambda char: fallback_ids(char.encode())))


@settings(deadline=None)
@given(any_pieces | broken_ids.map(one_by_one))
def test_any_tokens_in_any_pieces_give_their_text_and_only_broken_characters_wait(pieces: list[list[int]]) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    ids: list[int] = []
    shown = ""
    for piece in pieces:
        ids += piece
        shown += detokenizer.push(piece)
        waiting = BYTE_LEVEL.decode(ids).removeprefix(shown)
        assert waiting in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")
    assert shown + detokenizer.flush() == BYTE_LEVEL.decode(ids)


@settings(deadline=None, max_examples=50)
@given(fallback_pieces)
def test_byte_fallback_tokens_give_their_text(pieces: list[list[int]]) -> None:
    ids = [token for piece in pieces for token in piece]
    assert "".join(streamed(BYTE_FALLBACK, pieces)) == BYTE_FALLBACK.decode(ids)


def test_broken_fallback_bytes_do_not_take_back_what_is_shown() -> None:
    ids = [*fallback_ids("é".encode() + b"\xff"), token_id(BYTE_FALLBACK, "▁world")]
    assert streamed(BYTE_FALLBACK, one_by_one(ids)) == ["", "é", "", "\ufffd world", ""]


class Meter:
    """Counts the tokens that are decoded."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return BYTE_LEVEL.decode(ids)


ENDLESS = {
    "text": BYTE_LEVEL.encode("hello, 漢字 fox 😀").ids * 200,
    "special tokens": [token_id(BYTE_LEVEL, EOS)] * 2000,
    "broken characters": byte_ids(b"\xff\xf0\x9f" * 700),
    "special tokens within a character": [*byte_ids(b"\xf0"), *[token_id(BYTE_LEVEL, EOS)] * 2000],
}


@pytest.mark.parametrize("ids", ENDLESS.values(), ids=ENDLESS)
def test_the_cost_of_a_token_does_not_grow_with_the_text(ids: list[int]) -> None:
    meter = Meter()
    assert "".join(streamed(meter, one_by_one(ids))) == BYTE_LEVEL.decode(ids)
    assert meter.num_decoded < 32 * len(ids)
