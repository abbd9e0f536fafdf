from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models

from diptych.tokens.token_bytes import TokenBytes
from diptych.tokens.tokenizer import Tokenizer

TEXT = "Zoë says:\n\t你好 🙂!"


def test_tokens_of_a_byte_level_vocabulary_have_exact_bytes(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode(TEXT)
    assert b"".join(byte_tokenizer.token_bytes[token_id] for token_id in ids) == TEXT.encode()
    assert sorted(byte_tokenizer.token_bytes[token_id] for token_id in range(2, 258)) == [
        bytes([b]) for b in range(256)
    ]


def test_a_special_token_is_its_name(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.token_bytes[0] == b"</s>"


def test_an_id_outside_the_vocabulary_has_no_bytes(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.token_bytes[10_000] == b""


def test_sentence_pieces_have_spaces_and_bytes_to_fall_back_on() -> None:
    vocab = {"\u2581the": 0, "\u2581": 1, "<0xE4>": 2, "<0xBD>": 3, "好": 4, "<0x": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<0xAA>", special=True)])
    token_bytes = TokenBytes(backend)
    assert [token_bytes[i] for i in range(7)] == [b" the", b" ", b"\xe4", b"\xbd", "好".encode(), b"<0x", b"<0xAA>"]
