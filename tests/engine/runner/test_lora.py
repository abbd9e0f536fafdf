"""Adapters against transformers with merged weights, W + scale * B A: several of them and the base model in a batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from emulated_gpu import emulated_runner
from thread_ranks import on_stages
from torch import Tensor

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.shard import Shard
from diptych.checkpoints.source import ModelSource, keeping_all, open_model
from diptych.common.errors import InvalidRequest
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.lora.registry import Adapter, InvalidAdapter
from diptych.engine.models.adapters.lora_host import LoraHost
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_part import own_layers
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.values.batch import ForwardMode

NewDriver = Callable[..., Any]
WriteAdapter = Callable[..., dict[str, Tensor]]
BACKENDS = ["cpu", "torch"]
LENGTHS = [1, 2, 17, 40, 65, 33]
SLOTS = [2, -1, 0, 2, -1, 0]  # of each prompt's adapter: two adapters and the base model, interleaved
NUM_OUTPUTS = 8
FAMILY_CASES = {
    "Llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"),
    "Qwen2": ("q_proj", "v_proj"),  # with biases
    "Gemma2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"),
    "Phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),  # fused in the checkpoint
    "Qwen3Moe": ("q_proj", "k_proj", "v_proj", "o_proj"),  # beside experts
    "Llama4": ("q_proj", "k_proj", "v_proj", "o_proj", "feed_forward.up_proj", "feed_forward.down_proj"),  # no halves
    "DeepseekV3": (  # around latents, and the expert that every token passes
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
        *(f"shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    ),
    "Gemma4": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),  # of layers of two kinds
    "Lfm2": ("q_proj", "k_proj", "v_proj", "self_attn.out_proj", "w1", "w3", "w2"),  # beside short convolutions
    "Qwen3_5": ("k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),  # beside a delta rule
}
RECURRENT = {  # modules that belong to layers with a state, or are made for one
    "Lfm2": ("conv.in_proj", "conv.out_proj"),
    "Qwen3_5": ("linear_attn.in_proj_qkv", "linear_attn.out_proj"),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": EXPERTS,
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 16, "floor_scale": 8}
    | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1]},
    "DeepseekV3": EXPERTS
    | LATENTS
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "Gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,  # whose keys and values are those of two layers before
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,  # so an adapter of keys is one of values, too
        "sliding_window": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 200,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "Qwen3_5": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
}


SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


class Case:
    """A random model, two adapters of it, and what transformers makes of each."""

    def __init__(self, folder: Path, family: str, write_adapter: WriteAdapter) -> None:
        torch.manual_seed(0)
        name = {"Llama4": "Llama4Text", "Gemma4": "Gemma4Text", "Qwen3_5": "Qwen3_5Text"}.get(family, family)
        config = getattr(transformers, f"{name}Config")(**SHAPE | SETTINGS.get(family, {}), attn_implementation="eager")
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
        model.save_pretrained(folder / "base")
        self.source = open_model(str(folder / "base"))
        self.folders = {slot: folder / f"adapter{slot}" for slot in (0, 2)}
        self.models = {-1: model.eval()}
        targets = FAMILY_CASES[family]
        for slot, options in ((0, {"rank": 4, "alpha": 8}), (2, {"rank": 9, "alpha": 3})):
            shapes = {name: m.weight.shape for name, m in model.named_modules() if name.endswith(targets)}
            self.models[slot] = merged(model, write_adapter(self.folders[slot], shapes, seed=slot, **options))

    def driver(self, new_driver: NewDriver, backend: str, ranks: Communicator | None = None, **options: Any) -> Any:
        driver = new_driver(self.source, backend, max_loras=3, communicator=ranks, **options)
        for slot, folder in self.folders.items():
            install(driver, self.source, slot, folder, ranks)
        return driver


def install(
    driver: Any, source: ModelSource, slot: int, folder: Path, communicator: Communicator | None = None
) -> None:
    shard = Shard(0, 1)
    if communicator is not None:
        shard = Shard(communicator.rank, communicator.size, layers=own_layers(source.config, communicator.stages))
    host = LoraHost(source.config, shard, lambda: driver.runner.loras)
    host.install(slot, host.read(folder).weights)


def merged(model: Any, deltas: Mapping[str, Tensor]) -> Any:
    changed = copy.deepcopy(model)
    changed.lm_head.weight = torch.nn.Parameter(changed.lm_head.weight.detach().clone())  # it may be the embedding
    for module, delta in deltas.items():
        changed.get_submodule(module).weight.data += delta
    return changed.eval()


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, 200, length).tolist() for length in LENGTHS]


def continued(model: Any, text: list[int]) -> tuple[list[int], Tensor]:
    """Return the prompt with its greedy continuation, and the logits of all tokens."""
    tokens = list(text)
    with torch.inference_mode():
        for _ in range(NUM_OUTPUTS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens, model(torch.tensor([tokens])).logits[0]


@pytest.fixture
def llama(tmp_path: Path, write_adapter: WriteAdapter) -> Case:
    return Case(tmp_path, "Llama", write_adapter)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_a_batch_of_two_adapters_and_the_base_model_has_the_tokens_of_merged_weights(
    new_driver: NewDriver, write_adapter: WriteAdapter, tmp_path: Path, family: str, backend: str
) -> None:
    """Whole prompts, then decode; prompts in chunks after a prefix."""
    case, texts = Case(tmp_path, family, write_adapter), prompts()
    expected = [continued(case.models[slot], text) for slot, text in zip(SLOTS, texts, strict=True)]
    ends = [continued(model, texts[-1])[1][len(texts[-1]) - 1] for model in case.models.values()]
    assert all((one - other).abs().max() > 0.5 for one, other in itertools.combinations(ends, 2))
    driver = case.driver(new_driver, backend)
    driver.adapters = dict(enumerate(SLOTS))
    logits = driver.extend(dict(enumerate(texts)))
    for step in range(NUM_OUTPUTS):
        at = [length + step for length in LENGTHS]
        exact = torch.stack([logits_[i - 1] for (_, logits_), i in zip(expected, at, strict=True)])
        torch.testing.assert_close(logits, exact, atol=1e-3, rtol=1e-4)
        chosen = logits.argmax(-1).tolist()
        assert chosen == [tokens[i] for (tokens, _), i in zip(expected, at, strict=True)]
        logits = driver.decode(dict(enumerate(chosen)))
    chunked, long = case.driver(new_driver, backend), range(2, len(texts))
    chunked.adapters = dict(enumerate(SLOTS))
    for start, end in ((0, 7), (7, 8), (8, 15), (15, None)):
        logits = chunked.extend({i: expected[i][0][start:end] for i in long})
    torch.testing.assert_close(logits, torch.stack([expected[i][1][-1] for i in long]), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_ranks_add_their_parts_of_adapters_to_the_logits_of_one_process(
    new_driver: NewDriver, on_ranks: Callable[..., Any], write_adapter: WriteAdapter, tmp_path: Path, family: str
) -> None:
    """Each has the part of an adapter that belongs to its part of the matrix."""
    case, texts = Case(tmp_path, family, write_adapter), dict(enumerate(prompts()))

    def compute(ranks: Communicator | None) -> list[Tensor]:
        driver = case.driver(new_driver, "cpu", ranks)
        driver.adapters = dict(enumerate(SLOTS))
        found = [driver.extend(texts), driver.decode(dict.fromkeys(texts, 5))]
        driver.runner.loras.remove(2)
        return [*found, driver.decode(dict.fromkeys(texts, 6))]

    together, alone = on_ranks(2, compute), compute(None)
    for found, exact in zip(together, alone, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-4)
        assert found.argmax(-1).tolist() == exact.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Llama4", "DeepseekV3"])  # Gemma's ends are one matrix
def test_stages_add_what_adapters_change_of_their_layers_and_ends_to_the_bit(
    new_driver: NewDriver, write_adapter: WriteAdapter, tmp_path: Path, family: str
) -> None:
    """Also behind a step of which no row is sampled, and behind a removed adapter."""
    case, texts = Case(tmp_path, family, write_adapter), dict(enumerate(prompts()))
    case.source = keeping_all(case.source)

    def compute(ranks: Communicator | None) -> Tensor:
        driver = case.driver(new_driver, "cpu", ranks)
        driver.adapters = dict(enumerate(SLOTS))
        begun = driver.batch(ForwardMode.EXTEND, {each: text[:1] for each, text in texts.items()})
        driver.runner.logits(replace(begun, num_sampled=np.zeros_like(begun.num_sampled)))
        found = [driver.extend({each: text[1:] or [5] for each, text in texts.items()})]
        found.append(driver.decode(dict.fromkeys(texts, 5)))
        driver.runner.loras.remove(2)
        return torch.cat([*found, driver.decode(dict.fromkeys(texts, 6))])

    assert torch.equal(on_stages(3, compute), compute(None))


def test_what_latents_are_multiplied_by_is_refused_by_name(write_adapter: WriteAdapter, tmp_path: Path) -> None:
    """Attention multiplies queries by it, where the product of an adapter has no place."""
    case, name = Case(tmp_path, "DeepseekV3", write_adapter), "model.layers.0.self_attn.kv_b_proj"
    write_adapter(tmp_path / "other", {name: (4 * (24 + 20), 32)})
    with pytest.raises(InvalidAdapter, match="kv_b_proj' can't have an adapter"):
        read_adapter(tmp_path / "other", FAMILIES["deepseek_v3"].placement(case.source.config))


@pytest.mark.parametrize(("family", "module"), [(family, name) for family in RECURRENT for name in RECURRENT[family]])
def test_what_is_multiplied_around_a_state_is_refused_by_name(
    write_adapter: WriteAdapter, tmp_path: Path, family: str, module: str
) -> None:
    case, name = Case(tmp_path, family, write_adapter), f"model.layers.0.{module}"
    write_adapter(tmp_path / "other", {name: tuple(case.models[-1].get_submodule(name).weight.shape)})
    with pytest.raises(InvalidAdapter, match=f"{name}' can't have an adapter"):
        read_adapter(tmp_path / "other", FAMILIES[case.source.config.architecture].placement(case.source.config))


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_without_an_adapter_keep_their_bits_beside_those_with_one(
    new_driver: NewDriver, llama: Case, backend: str
) -> None:
    texts, plain, mixed = prompts(), new_driver(llama.source, backend), llama.driver(new_driver, backend)
    mixed.adapters = dict(enumerate(SLOTS))
    base = [i for i, slot in enumerate(SLOTS) if slot < 0]
    tokens = dict.fromkeys(range(len(texts)), 5)
    for expected, found in (
        (plain.extend(dict(enumerate(texts))), mixed.extend(dict(enumerate(texts)))),
        (plain.decode(tokens), mixed.decode(tokens)),
    ):
        assert torch.equal(found[base], expected[base])
        others = [i for i in range(len(texts)) if i not in base]
        assert not torch.isclose(found[others], expected[others], atol=1e-2).all()


def test_a_request_with_an_adapter_has_the_same_bits_in_any_batch(new_driver: NewDriver, llama: Case) -> None:
    texts, driver = prompts(), llama.driver(new_driver, "cpu")
    driver.adapters = dict(enumerate(SLOTS))
    together = driver.extend(dict(enumerate(texts)))
    for i, text in enumerate(texts):
        driver.forget(i)
        alone = [driver.extend({i: text[at : at + 9]}) for at in range(0, len(text), 9)][-1]
        assert torch.equal(alone[0], together[i])


def test_a_removed_adapter_changes_nothing_any_more(new_driver: NewDriver, llama: Case) -> None:
    text, driver = prompts()[-1], llama.driver(new_driver, "cpu")
    driver.adapters = {0: 2}
    driver.extend({0: text})
    driver.runner.loras.remove(2)
    driver.forget(0)
    expected = new_driver(llama.source, "cpu").extend({0: text})
    assert torch.equal(driver.extend({0: text}), expected)


def test_a_model_without_slots_says_how_to_get_some(new_driver: NewDriver, llama: Case) -> None:
    driver = new_driver(llama.source, max_loras=0)
    with pytest.raises(InvalidRequest, match="start it with --max-loras above 0 and without --deterministic"):
        driver.runner.loras.prepare(Adapter("0" * 32, ()))


def test_in_bfloat16_an_adapter_is_near_float32(new_driver: NewDriver, llama: Case) -> None:
    text = prompts()[-1]
    drivers = [llama.driver(new_driver, "torch", dtype=dtype) for dtype in ("float32", "bfloat16")]
    for driver in drivers:
        driver.adapters = {0: 2}
    exact, rounded = (driver.extend({0: text}).float() for driver in drivers)
    base = new_driver(llama.source, "torch").extend({0: text})
    assert torch.cosine_similarity(exact, rounded) > 0.99 > torch.cosine_similarity(exact, base)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_batch_has_the_logits_of_cpus(new_driver: NewDriver, llama: Case) -> None:
    drivers = [llama.driver(new_driver, "torch"), llama.driver(new_driver, "triton", device="cuda")]
    texts, tokens = dict(enumerate(prompts())), dict.fromkeys(range(len(SLOTS)), 5)
    for driver in drivers:
        driver.adapters = dict(enumerate(SLOTS))
    for expected, found in ([each.extend(texts) for each in drivers], [each.decode(tokens) for each in drivers]):
        torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-4)


def test_an_adapter_stands_beside_quantised_weights_as_beside_the_same_weights_expanded(
    new_driver: NewDriver, write_adapter: WriteAdapter, small_model: ModelSource, tmp_path: Path
) -> None:
    config, text = small_model.config, list(range(1000, 1040))
    shapes = {}
    for layer in range(config.num_layers):
        shapes[f"model.layers.{layer}.self_attn.q_proj"] = (config.num_heads * config.head_dim, config.hidden_size)
        shapes[f"model.layers.{layer}.mlp.down_proj"] = (config.hidden_size, config.ffn_size)
    write_adapter(tmp_path / "a", shapes, rank=4, alpha=0.5)
    logits = []
    for quantization in ("auto", "none"):
        driver = new_driver(small_model, quantization=quantization, max_loras=2)
        install(driver, small_model, 1, tmp_path / "a")
        base = driver.extend({0: text})
        driver.forget(0)
        driver.adapters = {0: 1}
        logits.append(driver.extend({0: text}))
        assert (logits[-1] - base).abs().max() > 0.5
    torch.testing.assert_close(logits[0], logits[1], atol=1e-3, rtol=1e-4)


@pytest.fixture
def recording(llama: Case, device: torch.device) -> GpuRunner:
    """A runner by the kernels of GPUs, with the adapters in their slots."""
    layout = ModelRunner.pool_layout(llama.source.config, num_pages=64, page_size=16, dtype="float32")
    kv = torch.full(layout.shape, torch.nan, device=device)
    options = ModelOptions("float32", attention_backend="triton", max_loras=3, max_requests=4)
    model, limits = load_model(llama.source, kv, options), StepLimits(16, 4, 64, max_loras=3)
    for slot, folder in llama.folders.items():
        adapter = read_adapter(folder, FAMILIES["llama"].placement(llama.source.config))
        model.loras.install(slot, model.loras.prepare(adapter))
    if device.type == "cpu":
        return emulated_runner(model, kv, limits, rungs=(4,), token_rungs=(16,))
    from diptych.engine.runner.gpu.new_runner import new_runner

    return new_runner(model, limits, device, with_graphs=True)


def test_recorded_steps_with_adapters_and_without_give_the_logits_of_the_c_kernels(
    new_driver: NewDriver, llama: Case, recording: GpuRunner
) -> None:
    """Prompts in pieces, and decode steps that are padded; then by the same graphs with other adapters in the rows."""
    three, two = {0: [3, 1, 4], 1: [7], 2: list(range(9))}, {0: [3, 1, 4, 5, 9], 1: list(range(8))}
    for texts, slots in ((three, [2, -1, 0]), (two, [2, 0]), (three, [-1, 2, 2]), (two, None)):
        reference, planner = llama.driver(new_driver, "cpu"), new_driver(llama.source, "cpu")
        reference.adapters = planner.adapters = {} if slots is None else dict(enumerate(slots))
        for mode, chunks in ((ForwardMode.EXTEND, texts), (ForwardMode.DECODE, {each: [5] for each in texts})):
            expected = reference.runner.logits(reference.batch(mode, chunks))
            found = recording.logits(planner.batch(mode, chunks))
            torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-4)
    parts = recording.recorded, recording.recorded_with_adapters
    assert [(len(each.graphs) > 0, len(each.pieces)) for each in parts] == [(True, 1), (True, 1)]
