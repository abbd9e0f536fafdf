"""Vectors of prompts against transformers: random models, saved by it, read from the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError

NewDriver = Callable[..., Any]
SHAPE: Mapping[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
PROMPTS = [[1 + (7 * i + 11 * n) % 130 for i in range(length)] for n, length in enumerate((40, 1, 17, 64))]
MODULES = ("Transformer", "Pooling", "Normalize")


def save(folder: Path, kind: str, config: Any) -> Any:
    torch.manual_seed(1)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    return model


def add_modules(folder: Path, pooling: Mapping[str, Any], kinds: tuple[str, ...] = MODULES) -> None:
    paths = [f"{index}_{kind}" if index else "" for index, kind in enumerate(kinds)]
    modules = [{"path": p, "type": f"sentence_transformers.models.{k}"} for p, k in zip(paths, kinds, strict=True)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def vectors_of(driver: Any, chunks: Mapping[int, list[int]]) -> Any:
    from diptych.engine.values.batch import ForwardMode

    batch = driver.batch(ForwardMode.EXTEND, chunks)
    return driver.runner.execute(batch, driver.greedy(len(chunks))).vectors


def assert_alike(ours: Any, theirs: Any) -> None:
    """Cosine 0.99999 at least, and of one length."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    lengths = np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1)
    assert ((ours * theirs).sum(axis=1) / (lengths[0] * lengths[1])).min() >= 0.99999
    np.testing.assert_allclose(lengths[0], lengths[1], rtol=1e-4)


def hidden_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma3Text"])
def test_last_tokens_are_those_of_auto_model_in_one_batch_and_in_chunks(
    new_driver: NewDriver, tmp_path: Path, family: str
) -> None:
    model = save(tmp_path, f"{family}Model", getattr(transformers, f"{family}Config")(**SHAPE))
    expected = torch.stack([hidden_of(model, prompt)[-1] for prompt in PROMPTS])
    driver = new_driver(open_model(str(tmp_path)))
    assert_alike(vectors_of(driver, dict(enumerate(PROMPTS))), expected)
    for number, prompt in enumerate(PROMPTS):
        driver.forget(number)
        chunks = [prompt[at : at + 13] for at in range(0, len(prompt), 13)]
        assert_alike([vectors_of(driver, {number: chunk})[0] for chunk in chunks][-1:], expected[number : number + 1])


@pytest.mark.parametrize("method", ["mean_tokens", "cls_token"])
def test_means_and_first_tokens_are_of_each_prompt_alone(new_driver: NewDriver, tmp_path: Path, method: str) -> None:
    model = save(tmp_path, "Qwen3Model", transformers.Qwen3Config(**SHAPE))
    add_modules(tmp_path, {f"pooling_mode_{method}": True})
    states = [hidden_of(model, prompt) for prompt in PROMPTS]
    expected = torch.stack([each.mean(dim=0) if method == "mean_tokens" else each[0] for each in states])
    assert_alike(vectors_of(new_driver(open_model(str(tmp_path))), dict(enumerate(PROMPTS))), expected)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_scores_of_labels_are_those_of_auto_model_for_sequence_classification(
    new_driver: NewDriver, tmp_path: Path, family: str
) -> None:
    config = getattr(transformers, f"{family}Config")(**SHAPE, num_labels=5)
    model = save(tmp_path, f"{family}ForSequenceClassification", config)
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    source = open_model(str(tmp_path))
    assert source.config.pooling is not None
    assert len(source.config.pooling.labels) == 5
    assert_alike(vectors_of(new_driver(source), dict(enumerate(PROMPTS))), expected)


def test_two_ranks_make_the_vectors_of_one(new_driver: NewDriver, on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    save(tmp_path, "Qwen3ForSequenceClassification", transformers.Qwen3Config(**{**SHAPE, "num_labels": 3}))
    source = open_model(str(tmp_path))

    def compute(communicator: Any) -> Any:
        return vectors_of(new_driver(source, communicator=communicator), dict(enumerate(PROMPTS)))

    assert_alike(on_ranks(2, compute), compute(None))


@pytest.mark.parametrize(
    ("pooling", "kinds", "words"),
    [
        ({"pooling_mode_max_tokens": True}, MODULES, "pooling by max is not supported"),
        ({}, MODULES, "pooling by nothing is not supported"),
        ({"pooling_mode": "lasttoken"}, ("Transformer", "Pooling", "LSTM"), "LSTM is not supported"),
    ],
)
def test_modules_that_nobody_computes_are_refused_by_name(
    tmp_path: Path, pooling: Mapping[str, Any], kinds: tuple[str, ...], words: str
) -> None:
    save(tmp_path, "Qwen3Model", transformers.Qwen3Config(**SHAPE))
    add_modules(tmp_path, pooling, kinds)
    with pytest.raises(ConfigError, match=words):
        open_model(str(tmp_path))


ENCODER: Mapping[str, Any] = {key: SHAPE[key] for key in SHAPE.keys() - {"num_key_value_heads", "head_dim"}}
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "Bert": {},
    "Roberta": {"pad_token_id": 1},
    "XLMRoberta": {"pad_token_id": 1},
    "ModernBert": {"local_attention": 16, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
}


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("method", ["mean", "cls"])
def test_encoders_give_what_auto_model_gives(new_driver: NewDriver, tmp_path: Path, family: str, method: str) -> None:
    config = getattr(transformers, f"{family}Config")(**{**ENCODER, **ENCODERS[family]})
    model = save(tmp_path, f"{family}Model", config)
    add_modules(tmp_path, {"pooling_mode": method})
    prompts = [[3 + token % 128 for token in prompt] for prompt in PROMPTS]  # not those that stand for nothing
    states = [hidden_of(model, prompt) for prompt in prompts]
    expected = torch.stack([each.mean(dim=0) if method == "mean" else each[0] for each in states])
    source = open_model(str(tmp_path))
    assert source.config.pooling is not None
    assert source.config.pooling.needs_all_tokens
    assert_alike(vectors_of(new_driver(source), dict(enumerate(prompts))), expected)


@pytest.mark.parametrize("family", ENCODERS)
def test_classifiers_by_encoders_give_their_logits(new_driver: NewDriver, tmp_path: Path, family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**{**ENCODER, **ENCODERS[family]}, num_labels=3)
    model = save(tmp_path, f"{family}ForSequenceClassification", config)
    prompts = [[3 + token % 128 for token in prompt] for prompt in PROMPTS]
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts])
    assert_alike(vectors_of(new_driver(open_model(str(tmp_path))), dict(enumerate(prompts))), expected)


def test_the_second_text_of_a_pair_is_told_by_the_separator(new_driver: NewDriver, tmp_path: Path) -> None:
    model = save(tmp_path, "BertForSequenceClassification", transformers.BertConfig(**{**ENCODER, "num_labels": 1}))
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    frame = {"single": "w1:0 $A:0 w2:0", "pair": "w1:0 $A:0 w2:0 $B:1 w2:1"}
    backend.post_processor = tokenizers.processors.TemplateProcessing(**frame, special_tokens=[("w1", 1), ("w2", 2)])
    backend.save(str(tmp_path / "tokenizer.json"))
    source = open_model(str(tmp_path))
    prompt = source.tokenizer().encode_pair("w5 w6", "w7 w8 w9")
    assert prompt == [1, 5, 6, 2, 7, 8, 9, 2]
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), token_type_ids=types).logits
    np.testing.assert_allclose(vectors_of(new_driver(source), {0: prompt}), expected, rtol=1e-4)


def test_gemma_3_sees_both_sides_and_its_dense_modules_are_computed(new_driver: NewDriver, tmp_path: Path) -> None:
    """As EmbeddingGemma: windows on both sides, a mean, two matrices."""
    settings = {**SHAPE, "num_hidden_layers": 7, "sliding_window": 16, "use_bidirectional_attention": True}
    settings |= {"query_pre_attn_scalar": 16}
    save(tmp_path, "Gemma3TextModel", transformers.Gemma3TextConfig(**settings))
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"sliding_window": 16}))  # as published: not halved
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling", "Dense", "Dense", "Normalize"))
    expected = torch.stack([hidden_of(model, prompt).mean(dim=0) for prompt in PROMPTS])
    for path, rows, columns in (("2_Dense", 96, 64), ("3_Dense", 64, 96)):
        (tmp_path / path).mkdir()
        activation = "torch.nn.modules.linear.Identity"
        dense = {"in_features": columns, "out_features": rows, "bias": False, "activation_function": activation}
        (tmp_path / path / "config.json").write_text(json.dumps(dense))
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
        save_file({"linear.weight": weight}, tmp_path / path / "model.safetensors")
        expected = expected @ weight.T
    assert_alike(vectors_of(new_driver(open_model(str(tmp_path)), "auto"), dict(enumerate(PROMPTS))), expected)
