from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diptych.tokens.detokenizer import ByteDetokenizer
from diptych.tokens.token_bytes import TextBytes

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL, ADDED, ADDED_TEXT, UNKNOWN = 256, 257, 258, 999


def byte_level() -> Tokenizer:
    """One token a byte, then a special token, and two added ones of which only one is made of the alphabet."""
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<é>"), AddedToken("<a 漢>")])
    return tokenizer


TOKENIZER = byte_level()
PIECES = TextBytes(TOKENIZER)
BYTE_OF = {PIECES[token_id]: token_id for token_id in range(256)}


def ids_of(data: bytes) -> list[int]:
    return [BYTE_OF[bytes([byte])] for byte in data]


def streamed(ids: list[int]) -> list[str]:
    detokenizer = ByteDetokenizer(PIECES)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    ids = ids_of("é漢😀!".encode())
    assert streamed(ids) == ["", "é", "", "", "漢", "", "", "", "😀", "!", ""]


def test_a_broken_character_is_shown_once_the_next_one_proves_it() -> None:
    assert streamed(ids_of(b"\xf0\x9fa\xf0")) == ["", "", "\ufffda", "", "\ufffd"]


@pytest.mark.parametrize("token_id", [SPECIAL, UNKNOWN])
def test_what_has_no_text_breaks_no_character(token_id: int) -> None:
    first, second = ids_of("é".encode())
    assert streamed([token_id, first, token_id, second]) == ["", "", "", "é", ""]


def test_a_flushed_detokenizer_starts_anew() -> None:
    detokenizer = ByteDetokenizer(PIECES)
    for _ in range(2):
        assert detokenizer.push(ids_of(b"a\xc3")) == "a"
        assert detokenizer.flush() == "\ufffd"


tokens = st.sampled_from([*ids_of("é漢😀a ".encode()), SPECIAL, ADDED, ADDED_TEXT, UNKNOWN]) | st.integers(0, 258)


@settings(deadline=None)
@given(st.lists(st.lists(tokens, max_size=6), max_size=12))
def test_any_tokens_in_any_pieces_give_what_the_tokenizer_decodes(runs: list[list[int]]) -> None:
    detokenizer = ByteDetokenizer(PIECES)
    shown = "".join([detokenizer.push(run) for run in runs])
    assert shown + detokenizer.flush() == TOKENIZER.decode([token_id for run in runs for token_id in run])
