"""Special tokens that someone must see have text; the others have none."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from diptych.generation.output_text import OutputText
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer

CALL, THINK, OTHER, EOS = 256, 257, 258, 259


@pytest.fixture(params=[decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel()])], ids=["bytes", "window"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = request.param
    added = [AddedToken("[CALL]", special=True), AddedToken("<think>", special=False)]
    backend.add_tokens([*added, AddedToken("[OTHER]", special=True), AddedToken("[EOS]", special=True)])
    return Tokenizer(backend, eos_ids=[EOS], chat_template=None)


def test_only_what_is_asked_for_is_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("é"), CALL, THINK, OTHER, *tokenizer.encode("x"), EOS]
    params = SamplingParams()
    assert OutputText(tokenizer, params).push(ids).text == "é<think>x"
    text = OutputText(tokenizer.showing({"[CALL]", "<think>"}), params)
    assert "".join(text.push([token_id]).text for token_id in ids) == "é[CALL]<think>x"


def test_what_is_shown_anyway_needs_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.showing({"<think>", "nowhere"}) is tokenizer
