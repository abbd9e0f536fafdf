"""What tokens look at, in families whose attention has windows, chunks, caps, sinks, or keys of other layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import open_model
from diptych.engine.values.batch import ForwardMode, InsightRows
from diptych.engine.values.watched_layers import default_layer, watched_layers
from diptych.generation.attention_tokens import AttentionWish, TokenAttention
from diptych.generation.insight import InsightWish

FAMILIES: Final = [
    "gpt oss",
    "gemma2",
    "llama 4",
    "gemma4, borrowed keys, wide networks, inputs of each layer",
    "qwen3.5 moe",
]


def check(found: TokenAttention, attentions: Mapping[int, Any], token: int) -> None:
    """Compare with transformers', `[1, num_heads, num_tokens, num_tokens]` of each layer with attention."""
    for number, layer in enumerate(found.layers):
        part = slice(number * found.top_k, (number + 1) * found.top_k)
        expected = attentions[layer][0, :, token, : token + 1].mean(dim=0).numpy()
        best = np.sort(expected)[::-1][: found.top_k]
        np.testing.assert_allclose(found.weights[part][: len(best)], best, atol=1e-4)
        listed = [each for each in found.positions[part] if each >= 0]
        np.testing.assert_allclose(expected[listed], best, atol=1e-4)


@pytest.mark.parametrize("family_model", FAMILIES, indirect=True)
def test_each_family_looks_where_it_does_in_transformers(new_driver: Callable[..., Any], family_model: Any) -> None:
    source = open_model(str(family_model.folder))
    watched = watched_layers(source.config, "cpu", 1).layers
    assert watched
    prompt, output = family_model.prompts[5], family_model.outputs[5]
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(family_model.folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        attentions = reference(torch.tensor([prompt + output]), output_attentions=True).attentions
    by_layer = dict(zip(watched, attentions, strict=True))
    driver, asked = new_driver(source), InsightRows(np.array([0]), [InsightWish(AttentionWish(4, watched))])

    def compute(mode: ForwardMode, token_ids: list[int]) -> TokenAttention:
        batch = replace(driver.batch(mode, {0: token_ids}), insight=asked)
        found: TokenAttention = driver.runner.execute(batch, driver.greedy(1)).insight[0].attention
        return found

    driver.extend({0: prompt[:13]})
    check(compute(ForwardMode.EXTEND, prompt[13:]), by_layer, len(prompt) - 1)
    for number, token_id in enumerate(output[:2]):
        check(compute(ForwardMode.DECODE, [token_id]), by_layer, len(prompt) + number)


def test_drafts_are_watched_each_behind_its_own_token(new_driver: Callable[..., Any], tiny_folder: Path) -> None:
    driver = new_driver(open_model(str(tiny_folder)))
    prompt, row, wish = [*range(17)], [5, 9, 2], InsightWish(AttentionWish(3, (0, 1)))
    driver.extend({0: prompt, 1: prompt})
    asked = InsightRows(np.arange(3), [wish] * 3)
    batch = driver.batch(ForwardMode.DECODE, {0: row})
    batch = replace(batch, num_sampled=batch.extend_lens, insight=asked)
    together = driver.runner.execute(batch, driver.greedy(3)).insight
    for number, token_id in enumerate(row):
        single = replace(driver.batch(ForwardMode.DECODE, {1: [token_id]}), insight=InsightRows(np.arange(1), [wish]))
        alone = driver.runner.execute(single, driver.greedy(1)).insight[0].attention
        assert together[number].attention.positions == alone.positions
        np.testing.assert_allclose(together[number].attention.weights, alone.weights, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_narrow_keys_are_read_as_they_are_stored(
    new_driver: Callable[..., Any], tiny_folder: Path, kv_dtype: str
) -> None:
    found = []
    for dtype in ("float32", kv_dtype):
        driver = new_driver(open_model(str(tiny_folder)), kv_dtype=dtype)
        asked = InsightRows(np.zeros(1, np.int64), [InsightWish(AttentionWish(32, (0,)))])
        batch = replace(driver.batch(ForwardMode.EXTEND, {0: [*range(30)]}), insight=asked)
        told = driver.runner.execute(batch, driver.greedy(1)).insight[0].attention
        found.append(dict(zip(told.positions, told.weights, strict=True)))
    assert found[0].keys() == found[1].keys()
    assert sum(found[1].values()) == pytest.approx(1, abs=1e-5)
    assert found[0] != found[1]
    furthest = max(abs(found[0][each] - found[1][each]) for each in found[0])
    assert furthest < {"bfloat16": 0.005, "fp8_e4m3": 0.05}[kv_dtype]  # as keys are rounded


@pytest.mark.parametrize("family_model", ["gemma2"], indirect=True)
def test_a_worker_says_which_layers_it_watches(family_model: Any) -> None:
    config: ModelConfig = open_model(str(family_model.folder)).config
    assert default_layer(config) == 3
    assert watched_layers(config, "cpu", 1).layers == (0, 1, 2, 3)
    for device, tp, words in (("cuda", 1, "--device cpu"), ("cpu", 2, "--tp 1"), ("sim", 1, "simulated")):
        refusal = watched_layers(config, device, tp).refuse(AttentionWish())
        assert refusal is not None
        assert words in refusal


def test_latents_are_not_watched(tiny_latent_folder: Path) -> None:
    refusal = watched_layers(open_model(str(tiny_latent_folder)).config, "cpu", 1).refuse(AttentionWish())
    assert refusal is not None
    assert "latents" in refusal
