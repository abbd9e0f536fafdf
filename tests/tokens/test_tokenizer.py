"""The tokenizer rebuilt from GGUF metadata, against transformers' own reading of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from diptych.checkpoints.source import ModelSource
from diptych.common.errors import ConfigError, InvalidRequest
from diptych.tokens import gguf_tokenizer
from diptych.tokens.tokenizer import Tokenizer

AWKWARD = [
    "",
    " ",
    "Hello world",
    " 123 4567 x9",
    "1.5e-3, 2024-01-01",
    "naïve café — “quotes”",
    "日本語 テスト 😀👩\u200d👩\u200d👧 ",
    "a\r\nb\n\n  c\t\td",
    "don't I'll we've DON'T",
    "   leading and trailing   ",
    "\x00\x01\ufffd\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "x<|endoftext|>y <repo_name>",
    "<|im_start",
    "العربية עברית हिन्दी",
    "def f(x):\n\treturn x**2  # squared\n",
    "A" * 300,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a\n b"},
    {"role": "assistant", "content": "<|im_end|>"},
    {"role": "user", "content": "naïve 😀"},
]


@pytest.fixture(scope="module")
def tokenizer(small_model: ModelSource) -> Tokenizer:
    return small_model.tokenizer()


@pytest.fixture(scope="module")
def reference(small_model_path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(small_model_path.parent, gguf_file=small_model_path.name)


def test_awkward_strings_have_the_ids_of_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    ours = {text: tokenizer.encode(text) for text in AWKWARD}
    assert ours == {text: reference.encode(text, add_special_tokens=False) for text in AWKWARD}


@pytest.mark.parametrize("text", AWKWARD)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_digits_of_every_script_stand_alone(tokenizer: Tokenizer) -> None:
    """As llama.cpp's `smollm` pre-tokenizer has it; transformers reads only ASCII digits so out of this file."""
    assert tokenizer.encode("a٣٤") == tokenizer.encode("a") + tokenizer.encode("٣") + tokenizer.encode("٤")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[1:2]])
def test_chats_render_as_in_transformers(
    tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert prompt == expected


def test_special_tokens_of_a_rendered_chat_become_single_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.apply_chat_template(CHAT[:2]))
    assert (ids.count(1), ids.count(2)) == (3, 2)  # <|im_start|>, <|im_end|>


def test_special_tokens_are_left_out_of_decoded_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi<|im_end|>")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<|im_end|>"


def test_half_a_character_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_a_lone_surrogate_is_the_callers_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_messages_that_the_template_cannot_render_are_the_callers_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="chat template rejects"):
        tokenizer.apply_chat_template([{"role": "user"}])


def metadata(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary of letters, with Ġ for the space."""
    tokens = ["<bos>", "<eos>", "a", "b", "Ġ", "ab", "1", "2", "12", "<think>"]
    base: dict[str, object] = {
        "model": "gpt2",
        "pre": "default",
        "tokens": tokens,
        "token_type": [3, 3, 1, 1, 1, 1, 1, 1, 1, 4],
        "merges": ["a b", "1 2"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (base | changes).items()}


def test_bos_comes_first_only_where_the_file_says_so_and_only_when_asked_for() -> None:
    with_bos = gguf_tokenizer.build(metadata(add_bos_token=True), (1,))
    without = gguf_tokenizer.build(metadata(add_bos_token=False), (1,))
    assert with_bos.encode("ab", add_special_tokens=True) == [0, 5]
    assert with_bos.encode("ab") == [5]
    assert without.encode("ab", add_special_tokens=True) == [5]


@pytest.mark.parametrize(("pre", "ids"), [("default", [8]), ("smollm", [6, 7]), ("llama-bpe", [8]), ("qwen2", [6, 7])])
def test_the_pre_tokenizer_is_the_one_that_the_file_names(pre: str, ids: list[int]) -> None:
    assert gguf_tokenizer.build(metadata(pre=pre), (1,)).encode("12") == ids


def test_user_defined_tokens_stay_whole_and_are_not_special() -> None:
    tokenizer = gguf_tokenizer.build(metadata(), (1,))
    assert tokenizer.encode("a<think>b") == [2, 9, 3]
    assert tokenizer.decode([2, 9, 3]) == "a<think>b"


@pytest.mark.parametrize(
    ("change", "named"), [({"model": "t5"}, "'t5' is not supported; gpt2 and llama are"), ({"pre": "tekken"}, "tekken")]
)
def test_unknown_kinds_are_refused_by_name(change: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        gguf_tokenizer.build(metadata(**change), (1,))


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        gguf_tokenizer.build(metadata(), (1,)).apply_chat_template([{"role": "user", "content": "hi"}])
