"""Whatever is cut out of a prompt and remembered: its tokens are those of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from diptych.checkpoints.source import ModelSource
from diptych.common.errors import InvalidRequest
from diptych.tokens.prompt_encoder import (
    CHARS_PER_TOKEN,
    CUT_TOKENS,
    QUICK_CHARS,
    QUICK_SEGMENTS,
    PromptEncoder,
)
from diptych.tokens.token_bytes import TokenBytes
from diptych.tokens.tokenizer import Tokenizer, TokenLength, token_length

CACHE_BYTES = 20_000
CORPUS = ["hello world, how are you today? ", "the user said: im_end im_start\n\n  table b c", "a1 2b  naïve\tx"] * 4
MARKS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]
ALMOST = ["<|im_", "im_start|>", "<", "s>", "[INST", "<table>", "<tab", "<|im_end|>x", "a<|"]
WORDS = [
    "hello",
    "Hello",
    "world",
    "user",
    "im_end",
    "1",
    "23",
    "é",
    "e\u0301",
    "😀",
    "\u200d",
    ".",
    "\t",
    "\n",
    "\n\n",
]
TEXT = st.lists(st.sampled_from([*MARKS, *ALMOST, *WORDS, " ", "  "]), max_size=30).map("".join)


def special(*contents: str, **options: bool) -> list[AddedToken]:
    return [AddedToken(content, special=True, **options) for content in contents]


def plain(*contents: str, **options: bool) -> list[AddedToken]:
    return [AddedToken(content, **options) for content in contents]


def byte_level(*, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram(scheme: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    """Merges over a whole piece between added tokens, and a space before each: as the first Llamas did."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return backend


def build(make: Callable[[], tokenizers.Tokenizer], added: Sequence[AddedToken]) -> Tokenizer:
    backend = make()
    backend.add_tokens(list(added))
    return Tokenizer(backend, eos_ids=[0], chat_template=None)


CUT = {
    "byte level": build(byte_level, special(*MARKS)),
    "byte level, a space before each piece": build(lambda: byte_level(add_prefix_space=True), special(*MARKS)),
    "one mark is the beginning of another": build(byte_level, special(*MARKS, "<|im_end|>x", "<|im_end|>x<s>")),
    "marks that take the space behind them": build(byte_level, special(*MARKS, rstrip=True)),
    "a mark that takes the space before it": build(byte_level, special(*MARKS) + special("user", lstrip=True)),
    "other added tokens": build(byte_level, special(*MARKS) + plain("\n\n", "  ", "<table>", normalized=False)),
    "added tokens in normalised text": build(lambda: unigram("always"), special(*MARKS) + plain("hello", "<s>x")),
    "unigram, a space before all": build(lambda: unigram("always"), special(*MARKS)),
    "unigram, a space before the first piece": build(lambda: unigram("first"), special(*MARKS)),
    "sentence piece": build(sentence_piece, special(*MARKS)),
    "word piece": build(word_piece, special(*MARKS)),
}
WHOLE = {
    "no special tokens": build(byte_level, plain("<table>", normalized=False)),
    "only special tokens of normalised text": build(byte_level, special(*MARKS, normalized=True)),
    "words of their own": build(byte_level, special(*MARKS) + special("hello", single_word=True)),
    "an added token with a mark in it": build(byte_level, special(*MARKS) + plain("hello<s>", normalized=False)),
    "an added token that may end in a mark": build(byte_level, special(*MARKS) + plain("a<|", normalized=False)),
}
ALL = CUT | WHOLE


@pytest.mark.parametrize("name", CUT)
def test_a_text_may_be_cut_before_special_tokens(name: str) -> None:
    assert CUT[name].cut_points() is not None


@pytest.mark.parametrize("name", WHOLE)
def test_a_text_is_not_cut_where_its_tokens_might_change(name: str) -> None:
    assert WHOLE[name].cut_points() is None


def test_a_text_is_not_cut_where_tokens_depend_on_its_length_or_on_chance() -> None:
    truncating, padding, random = byte_level(), byte_level(), byte_level()
    truncating.enable_truncation(8)
    padding.enable_padding(length=8)
    random.model.dropout = 0.1
    backends = (truncating, padding, random)
    assert [build(lambda each=each: each, special(*MARKS)).cut_points() for each in backends] == [None] * 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_has_the_tokens_of_its_whole_text(name: str) -> None:
    tokenizer, encoder = ALL[name], PromptEncoder(ALL[name], CACHE_BYTES)

    @example("hello  user<s>  user", False)
    @example("hello<|im_end|>x<s>hello", True)
    @settings(max_examples=40, deadline=None, database=None)
    @given(text=TEXT, add_special_tokens=st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        ids = encoder.encode(text, add_special_tokens=add_special_tokens)
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=add_special_tokens)

    check()
    assert (len(encoder.cache) > 0) == (name in CUT)
    assert encoder.cache.num_bytes <= CACHE_BYTES


def test_the_small_model_s_prompts_have_the_tokens_of_their_whole_text(small_model: ModelSource) -> None:
    tokenizer = small_model.tokenizer()
    encoder = PromptEncoder(tokenizer, CACHE_BYTES)
    turns = ["<|im_start|>user\n Hello  world <|im_end|>\n", "<|im_start|><|im_end|>", "x\n\n y", "<repo_name> é"]
    texts = ["".join(turns[:count]) for count in range(5)] + ["".join(turns[::-1])]
    assert [encoder.encode(text).tolist() for text in texts] == [tokenizer.encode(text) for text in texts]
    assert len(encoder.cache) == 7


def test_a_text_that_is_not_valid_unicode_is_refused_and_not_remembered() -> None:
    encoder = PromptEncoder(CUT["byte level"], CACHE_BYTES)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            encoder.encode("<s>\ud800")
    assert len(encoder.cache) == 0


def test_nothing_is_remembered_without_memory_for_it() -> None:
    encoder = PromptEncoder(CUT["byte level"], 0)
    assert encoder.encode("<s>hello").tolist() == CUT["byte level"].encode("<s>hello")
    assert len(encoder.cache) == 0


def test_what_is_new_is_told_from_what_is_known() -> None:
    encoder = PromptEncoder(CUT["byte level"], CACHE_BYTES)
    assert encoder.encode_known("<s>hello", 7) is None
    assert encoder.encode_known("<s>hello", 8) == encoder.encode("<s>hello")
    assert encoder.encode_known("<s>hello</s>", 4) == encoder.encode("<s>hello</s>")
    assert (encoder.cache.new_chars, encoder.cache.known_chars) == (8 + 4, 8 + 8 + 12)


def test_what_is_known_is_not_quick_when_it_is_long_or_in_many_pieces() -> None:
    encoder = PromptEncoder(CUT["byte level"], 1 << 20)
    for text in ("<s>" * (QUICK_SEGMENTS + 1), "<s>" + "hello " * (QUICK_CHARS // 6 + 1)):
        assert len(encoder.encode(text)) > QUICK_SEGMENTS
        assert encoder.encode_known(text, len(text)) is None
    text = "<s>" * QUICK_SEGMENTS
    assert encoder.encode_known(text, 0) == encoder.encode(text)


@pytest.mark.parametrize("name", ALL)
def test_a_text_that_is_not_too_long_is_never_taken_for_too_long(name: str) -> None:
    tokenizer, encoder = ALL[name], PromptEncoder(ALL[name], CACHE_BYTES)

    @example("hello <|im_end|>" * 100, 10)
    @example("x" * 5000, 100)
    @example("m" * 2000, 12)  # one unknown word for WordPiece, and 96 tokens of its beginning
    @settings(max_examples=40, deadline=None, database=None)
    @given(text=TEXT.map(lambda text: text * 40), max_tokens=st.integers(1, 300))
    def check(text: str, max_tokens: int) -> None:
        assert not encoder.has_more_than(max_tokens, text) or len(tokenizer.encode(text)) > max_tokens

    check()


class CountedTokenizer(Tokenizer):
    """Notes how many characters it was given."""

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        self.num_chars: int = getattr(self, "num_chars", 0) + sum(map(len, texts))
        return super().encode_all(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("text", ["hello world 123, ", "\u00e9", "x", "<s>", " "])
def test_a_text_of_more_bytes_than_the_longest_tokens_have_is_not_tokenised_at_all(text: str) -> None:
    max_tokens, backend = 1000, byte_level()
    longest = token_length(backend).longest  # type: ignore[union-attr]
    assert longest == max(len(TokenBytes(backend)[token]) for token in range(backend.get_vocab_size()))
    tokenizer = CountedTokenizer(backend, eos_ids=[], chat_template=None)
    encoder = PromptEncoder(tokenizer, CACHE_BYTES)
    tokenizer.num_chars = 0
    assert encoder.has_more_than(max_tokens, text * (longest * max_tokens // len(text) + 1))
    assert tokenizer.num_chars == 0


@pytest.mark.parametrize("text", ["hello world 123, ", "\u00e9", "x", "<s>"])
def test_of_a_text_that_is_far_too_long_no_more_than_its_beginning_is_tokenised(text: str) -> None:
    max_tokens = 1000
    tokenizer = CountedTokenizer(byte_level(), eos_ids=[], chat_template=None)
    encoder = PromptEncoder(tokenizer, CACHE_BYTES)
    encoder._length = None  # where nothing is told by the length
    tokenizer.num_chars = 0
    assert encoder.has_more_than(max_tokens, text * (2**22 // len(text)))
    assert tokenizer.num_chars <= 2 * CHARS_PER_TOKEN * max_tokens


def test_a_text_of_long_tokens_is_looked_at_until_it_is_clear() -> None:
    max_tokens, backend = 100, byte_level()
    backend.add_tokens([AddedToken("wordwordwordwordwordwordwordword")])  # four times as long as expected
    backend.add_tokens([AddedToken("x" * 10_000)])  # so that the length alone tells nothing
    tokenizer = CountedTokenizer(backend, eos_ids=[], chat_template=None)
    encoder, text = PromptEncoder(tokenizer, CACHE_BYTES), "wordwordwordwordwordwordwordword" * 10_000
    assert not encoder.has_more_than(max_tokens, text[: 32 * max_tokens])
    tokenizer.num_chars = 0
    assert encoder.has_more_than(max_tokens, text)
    assert tokenizer.num_chars <= 2 * 2 * 32 * (max_tokens + CUT_TOKENS)


def lacking(*chars: str) -> tokenizers.Tokenizer:
    """Without these characters of the alphabet: their bytes are dropped."""
    kept = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(chars))
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(kept)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def removing() -> tokenizers.Tokenizer:
    backend = byte_level()
    steps = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


def normalised() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


UNTOLD: list[Callable[[], tokenizers.Tokenizer]] = [
    lambda: lacking("\u00a1"),  # a last byte
    lambda: tokenizers.Tokenizer(models.BPE()),
    lambda: unigram("always"),
    *(removing, normalised, sentence_piece, word_piece),
]


@pytest.mark.parametrize("make", UNTOLD)
def test_where_bytes_may_be_in_no_token_the_length_tells_nothing(make: Callable[[], tokenizers.Tokenizer]) -> None:
    assert token_length(make()) is None


@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}])
def test_nor_where_an_added_token_takes_the_white_space_beside_it(options: dict[str, bool]) -> None:
    assert token_length(build(byte_level, special("<mask>", **options))._backend) is None


def test_characters_that_a_vocabulary_drops_do_not_count() -> None:
    backend = lacking("\u0104")  # the byte 4
    assert backend.encode("a\x04b").tokens == ["a", "b"]
    length = token_length(backend)
    assert length == TokenLength(1, "\x04")
    assert (length.least_tokens("\x04" * 1000), length.least_tokens("a\x04b" * 1000)) == (0, 2000)


def test_of_the_small_model_a_text_has_a_token_for_every_81_bytes(small_model: ModelSource) -> None:
    tokenizer = small_model.tokenizer()
    length = tokenizer.token_length()
    assert length == TokenLength(81, "\x04\x06\x13\x14\x16\x1d")

    @example("\x04\x13" * 500)
    @example("\n" + " " * 80)
    @example("\U00040000" * 100)
    @settings(max_examples=100, deadline=None, database=None)
    @given(text=st.text() | TEXT)
    def check(text: str) -> None:
        assert length.least_tokens(text) <= len(tokenizer.encode(text))

    check()
