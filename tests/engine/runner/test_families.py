"""Every model family against transformers: random weights, saved by transformers, read from the folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from layer_kinds import FAMILIES, of_each_kind, traits
from thread_ranks import on_stages
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.architectures.stages import stage_layers
from diptych.checkpoints.source import ModelSource, keeping_all, open_model
from diptych.common.errors import ConfigError
from diptych.engine.tensor_parallel.sum_rule import SumRule
from diptych.engine.values.batch import ForwardBatch, ForwardMode

NewDriver = Callable[..., Any]
EQUAL: dict[str, Any] = {"atol": 0.0, "rtol": 0.0}
NEAR: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
OF_FOUR_RANKS = (  # heads: plain, biased, fused, gated, with sinks, of two kinds, none; experts of each form
    *(
        "llama",
        "qwen2",
        "phi3",
        "gpt oss",
        "llama 4",
        "gemma4, windows and wide heads",
        "gemma4, experts beside a network",
    ),
    *("deepseek v3", "deepseek v3.2", "mixtral", "qwen3 moe", "qwen2 moe", "ernie4.5 moe", "minimax m2", "qwen3 next"),
)


OF_STAGES = (  # ends: tied, scaled, capped, with norms before or behind blocks; layers of several kinds
    *("llama", "llama, tied, one KV head", "gpt oss", "gemma2", "gemma3", "olmo2", "granite", "nemotron"),
    *("llama 4", "deepseek v3", "deepseek v3.2", "mixtral", "qwen3 moe, normalised, some layers dense", "minimax m2"),
)


def test_whole_prompts_and_decode_give_the_logits_and_the_tokens_of_transformers(
    new_driver: NewDriver, family_model: Any
) -> None:
    assert_prompts_and_decode_are_those_of_transformers(new_driver, family_model, "cpu")


def test_chunks_after_a_cached_prefix_give_the_logits_of_transformers(new_driver: NewDriver, family_model: Any) -> None:
    assert_chunks_are_those_of_transformers(new_driver, family_model, "cpu")


@of_each_kind
def test_attention_without_kernels_gives_them_too(new_driver: NewDriver, family_model: Any) -> None:
    assert_prompts_and_decode_are_those_of_transformers(new_driver, family_model, "torch")
    assert_chunks_are_those_of_transformers(new_driver, family_model, "torch")


def assert_prompts_and_decode_are_those_of_transformers(new_driver: NewDriver, family_model: Any, backend: str) -> None:
    driver = new_driver(open_model(str(family_model.folder)), backend)
    logits = driver.extend(dict(enumerate(family_model.prompts)))
    ends = [len(prompt) - 1 for prompt in family_model.prompts]
    chosen = []
    for step in range(len(family_model.outputs[0])):
        assert_close(logits, [theirs[end + step] for theirs, end in zip(family_model.logits, ends, strict=True)])
        chosen.append(logits.argmax(-1).tolist())
        logits = driver.decode(dict(enumerate(chosen[-1])))
    assert [list(tokens) for tokens in zip(*chosen, strict=True)] == family_model.outputs


def assert_chunks_are_those_of_transformers(new_driver: NewDriver, family_model: Any, backend: str) -> None:
    driver = new_driver(open_model(str(family_model.folder)), backend)
    texts = [prompt + output for prompt, output in zip(family_model.prompts, family_model.outputs, strict=True)]
    long = {i: text for i, text in enumerate(texts) if len(text) > 20}
    for start, end in ((0, 7), (7, 8), (8, 15), (15, None)):
        logits = driver.extend({i: text[start:end] for i, text in long.items()})
    assert_close(logits, [family_model.logits[i][-1] for i in long])


def test_two_ranks_compute_what_one_does(
    new_driver: NewDriver, on_ranks: Callable[..., Any], family_model: Any
) -> None:
    assert_ranks_compute_what_one_does(new_driver, on_ranks, family_model, 2, "cpu")


@of_each_kind
def test_two_ranks_compute_the_same_bits_in_whatever_layout(
    new_driver: NewDriver, on_ranks: Callable[..., Any], family_model: Any
) -> None:
    source = open_model(str(family_model.folder))
    refuse_more_ranks_than_heads(source.config, 2)
    compute = partial(logits_of_rank, new_driver, source, "cpu", family_model.prompts)
    (together, _), (fused, its_calls) = on_ranks(2, compute, SumRule(2, 0)), on_ranks(2, compute, fuses=True)
    plain, plain_calls = on_ranks(2, compute)
    assert torch.equal(fused, together)
    assert torch.equal(plain, together)
    assert its_calls["all_reduce"] + its_calls["fused"] == plain_calls["all_reduce"]


@pytest.mark.parametrize("family_model", OF_FOUR_RANKS, indirect=True)
def test_four_ranks_two_of_which_share_each_head_compute_what_one_does(
    new_driver: NewDriver, on_ranks: Callable[..., Any], family_model: Any
) -> None:
    """Every family's tensors are split among two ranks above; how heads are shared depends on their form alone."""
    assert_ranks_compute_what_one_does(new_driver, on_ranks, family_model, 4, "torch")


def assert_ranks_compute_what_one_does(
    new_driver: NewDriver, on_ranks: Callable[..., Any], family_model: Any, size: int, backend: str
) -> None:
    source = open_model(str(family_model.folder))
    refuse_more_ranks_than_heads(source.config, size)
    compute = partial(logits_of_rank, new_driver, source, backend, family_model.prompts)
    scatter = SumRule(size, 0)
    (together, calls), (alone, _) = on_ranks(size, compute, scatter), compute(None)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert together.argmax(-1).tolist() == alone.argmax(-1).tolist()
    assert (calls["reduce_scatter"] > 0) == (not source.config.layer_scales)
    if source.config.moe is not None:  # each rank has experts whole: of 6, four ranks have one or two
        by_experts, _ = on_ranks(size, partial(compute, expert_parallel=True), scatter)
        torch.testing.assert_close(by_experts, alone, atol=1e-4, rtol=1e-4)
        assert by_experts.argmax(-1).tolist() == alone.argmax(-1).tolist()


def refuse_more_ranks_than_heads(config: ModelConfig, size: int) -> None:
    recurrent = config.recurrent
    if recurrent is not None and any(number % size for number in recurrent.mixer.heads.values()):
        pytest.skip("so many ranks can't share its heads, and are refused")


def logits_of_rank(
    new_driver: NewDriver,
    source: ModelSource,
    backend: str,
    prompts: list[list[int]],
    communicator: Any,
    *,
    expert_parallel: bool = False,
) -> tuple[Tensor, Any]:
    """Return the logits behind prompts and behind a token more, and how often a rank called the others."""
    driver = new_driver(source, backend, communicator=communicator, expert_parallel=expert_parallel)
    extended = driver.extend(dict(enumerate(prompts)))
    logits = torch.cat([extended, driver.decode({i: 3 for i in range(len(prompts))})])
    return logits, communicator and communicator.calls


WITH_STATES = ("qwen3.5 moe", "kimi linear", "lfm2")  # each kind of state, and layers that keep nothing


ON_STAGES: dict[str, int] = {
    **dict.fromkeys([*OF_STAGES, *(f"{name}, seven layers" for name in WITH_STATES), "nemotron h, ten layers"], 3),
    "glm moe dsa, layers that share a choice": 2,
    "mistral large 4 with images, six layers": 2,
    "gemma4, groups of layers with heads of two widths": 2,
}


@pytest.mark.parametrize(("family_model", "most"), ON_STAGES.items(), indirect=["family_model"])
def test_stages_of_a_pipeline_compute_the_bits_of_one_process(
    new_driver: NewDriver, family_model: Any, most: int
) -> None:
    """Behind a step of which no row is sampled."""
    source = keeping_all(open_model(str(family_model.folder)))

    def compute(communicator: Any) -> Tensor:
        driver = new_driver(source, communicator=communicator)
        prompts = dict(enumerate(family_model.prompts))
        driver.runner.logits(without_samples(driver.batch(ForwardMode.EXTEND, {i: [2, 3] for i in prompts})))
        return torch.cat([driver.extend(prompts), driver.decode(dict.fromkeys(prompts, 3))])

    assert torch.equal(on_stages(min(most, source.config.num_layers), compute), compute(None))


@pytest.mark.parametrize(
    ("family_model", "num_stages"),
    [("gpt oss, six layers", 3), ("gemma2", 2), ("olmo3, eight layers", 2), ("llama 4, eight layers", 2)],
    indirect=["family_model"],
)
def test_stages_with_windows_in_pages_of_their_own_compute_the_bits_of_one_process(
    new_driver: NewDriver, family_model: Any, num_stages: int
) -> None:
    """In chunks, behind which windows have passed pages."""
    source = open_model(str(family_model.folder))
    assert len(source.config.page_groups) > 1

    def compute(communicator: Any) -> Tensor:
        driver = new_driver(source, communicator=communicator)
        prompt = family_model.prompts[-1]
        found = [driver.extend({0: prompt[at : at + 29]}) for at in range(0, len(prompt), 29)]
        return torch.cat([*found, driver.extend({1: [2, 3]}), driver.decode({0: 3, 1: 4}), driver.decode({0: 5, 1: 6})])

    assert torch.equal(on_stages(num_stages, compute), compute(None))


REFUSED = (
    "layers of .* (that attend|that keep a state|with a window|without one)$",
    "attend to what layers of the stage choose",
    "borrow",
    "embedding of its own",
)


def test_every_family_has_stages_of_all_its_layers_or_is_refused_in_words(
    family_configs: dict[str, ModelConfig],
) -> None:
    refused = {name: words for name, config in family_configs.items() if (words := refusal(config))}
    assert all(any(re.search(known, words) for known in REFUSED) for words in refused.values()), refused
    assert not refused.keys() & {*OF_STAGES}
    assert len(refused) < len(family_configs) / 2


def refusal(config: ModelConfig) -> str:
    """Say why a model has no stages; nothing if it has."""
    try:
        stages = stage_layers(replace(config, keeps_all=True), min(3, config.num_layers))
    except ConfigError as error:
        return str(error)
    assert [layer for stage in stages for layer in stage] == list(range(config.num_layers))
    return ""


def without_samples(batch: ForwardBatch) -> ForwardBatch:
    """The step as one of prompts that go on behind it."""
    return replace(batch, num_sampled=np.zeros_like(batch.num_sampled))


def test_the_families_that_stand_for_all_differ_from_llama_in_every_way_that_any_does(
    family_configs: dict[str, ModelConfig],
) -> None:
    found, shown = (
        set[str]().union(*(traits(config) for name, config in family_configs.items() if name in names))
        for names in (family_configs, FAMILIES)
    )
    assert found - shown == set()
    assert {"qk_norm", "Moe", "Moe.scoring", "Mamba2.conv_bias"} <= found


@of_each_kind
def test_a_request_has_the_same_bits_in_any_batch_and_however_its_prompt_is_cut(
    new_driver: NewDriver, family_model: Any
) -> None:
    """So that replays, on this worker or another one, take no other turn."""
    driver = new_driver(open_model(str(family_model.folder)))
    together = driver.extend(dict(enumerate(family_model.prompts)))
    for i, prompt in enumerate(family_model.prompts):
        driver.forget(i)
        alone = [driver.extend({i: prompt[at : at + 29]}) for at in range(0, len(prompt), 29)][-1]
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("family_model", ["llama", "deepseek v3.2"], indirect=True)
def test_on_stages_a_deterministic_request_has_the_same_bits_too(new_driver: NewDriver, family_model: Any) -> None:
    """As output and as prompt, alone and beside others."""
    source, (one, *others) = open_model(str(family_model.folder)), family_model.prompts

    def compute(communicator: Any) -> Tensor:
        driver = new_driver(source, communicator=communicator, deterministic=True)
        alone = [driver.extend({0: one[at : at + 9]}) for at in range(0, len(one), 9)][-1]
        beside = driver.extend({1: one, **dict(enumerate(others, 2))})[:1]
        tokens = (3, 1, 4)
        said = [driver.decode({0: token}) for token in tokens]
        asked = driver.extend({1: list(tokens), 9: others[0]})[:1]
        return torch.cat([alone, said[-1], beside, asked])

    found = on_stages(min(3, source.config.num_layers), compute)
    assert torch.equal(found[:2], found[2:])
    assert torch.equal(found, compute(None))


@of_each_kind
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_row_of_drafts_has_the_bits_of_single_tokens_beside_any_others(
    new_driver: NewDriver, family_model: Any, backend: str
) -> None:
    """So that the tokens of a request are the same with drafts and without, whoever else has some.

    Of each row two tokens come true, which the next one goes on behind. Torch promises no bits for other batches.
    """
    source = open_model(str(family_model.folder))
    if backend == "torch" and source.config.recurrent is None:
        pytest.skip("recurrent layers alone are computed otherwise")
    driver = new_driver(source, backend, num_pages=128)
    prompt, row = family_model.prompts[0][:14], [5, 9, 2, 6, 3]  # which crosses a page
    driver.extend({0: prompt, 1: prompt})
    wrong, right = (
        torch.cat([driver.decode({request: token}) for token in tokens])
        for request, tokens in ((0, row), (1, [5, 9, 7, 4, 8]))
    )
    for num_others in (0, 3, 15) if backend == "cpu" else (3,):
        others = range(3, 3 + num_others)
        driver.extend({2: prompt, **{each: family_model.prompts[0][: 1 + each % 7] for each in others}})
        for tokens, expected in ((row, wrong), ([7, 4, 4], right[2:4]), ([8], right[4:])):
            rows = {2: tokens, **{each: tokens[: 1 + each % 3] for each in others}}
            found = driver.verify(rows)[: len(expected)]
            torch.testing.assert_close(found, expected, **(EQUAL if backend == "cpu" else NEAR))
            for each, own in rows.items():
                driver.keep(each, min(2, len(own)), own)
        for each in (2, *others):
            driver.forget(each)


def assert_close(ours: Tensor, theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-3, rtol=1e-4)


@of_each_kind
def test_bfloat16_is_near_float32(new_driver: NewDriver, family_model: Any) -> None:
    """Near enough that no norm, bias or scale is missing; experts may be chosen otherwise in a token or two."""
    driver = new_driver(open_model(str(family_model.folder)), "auto", "bfloat16")
    rounded = driver.extend(dict(enumerate(family_model.prompts)))
    assert rounded.dtype == torch.bfloat16
    ends = [len(prompt) - 1 for prompt in family_model.prompts]
    exact = torch.stack([logits[end] for logits, end in zip(family_model.logits, ends, strict=True)])
    assert torch.cosine_similarity(rounded.float(), exact).median() > 0.98
