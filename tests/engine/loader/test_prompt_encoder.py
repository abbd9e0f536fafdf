"""Whatever is cut out of a prompt and remembered: its tokens are those of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from diptych.common.errors import InvalidRequest
from diptych.engine.loader.prompt_encoder import QUICK_CHARS, QUICK_SEGMENTS, PromptEncoder
from diptych.engine.loader.source import ModelSource
from diptych.engine.loader.tokenizer import Tokenizer

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


@pytest.mark.model
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
