"""Models for every component's tests: the real small one, fetched at the first use, and a tiny one of each family."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import hypothesis
import numpy as np
import pytest
import tokenizers
from one_process import UNITS, OneProcess, lies_among_integration_tests, mark_integration_tests
from pairs import covering
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from diptych.architectures.config import ModelConfig
from diptych.architectures.registry import from_hf
from diptych.checkpoints import demo
from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.trust.tokens import TOKEN_VARIABLE
from diptych.tokens.tokenizer import Tokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, and jobs in the background ignore it
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,  # how long an example takes says how busy the machine is
    derandomize=not os.environ.get("DIPTYCH_DEEP_CHECKS"),  # a usual run is the same each time
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")
os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it once; two that spin on the same cores cost ten times as much
os.environ[TOKEN_VARIABLE] = "the-token-of-all-tests"  # for every process that a test starts, and for its own clients

ALONE: Final = (
    *("chaos", "cli", "kvtransfer", "engine/scheduler/links/test_tester", "pd/test_processes"),
    *(f"platform/test_{what}" for what in ("disturbances", "drain", "frozen", "kv_require", "links", "roles")),
)
SMALL_MODEL: Final = (  # one worker starts the platform of the small model that these leave as they found it
    *("platform/test_anthropic_client", "platform/test_bad_input", "platform/test_disconnects", "platform/test_grpc"),
    *("platform/test_health", "platform/test_language", "platform/test_open", "platform/test_parity"),
    *("platform/test_ports", "platform/test_sampling", "platform/test_structured_output"),
    "platform/test_tokenize_at_worker",
)
SIMULATED: Final = ("platform/test_console_cache", "platform/test_simulated", "platform/test_watching")  # and another
FAMILIES: Final = (  # one worker makes their models, each once
    *("engine/runner/test_families", "engine/runner/test_families_on_gpus", "engine/runner/gpu/test_piece_graphs"),
    *("engine/runner/test_attention_capture", "engine/runner/test_in_place", "engine/runner/test_window_pages"),
    *("pd/test_families", "pd/test_unlike_families", "unified/test_role_changes"),
)


TESTS: Final = Path(__file__).parent
BEGUN_WITH: Final = ("architectures", "engine", "kernels")  # folders; the last two see to it what Triton is to be


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """With `-n 3`: what measures time or counts shared memory runs one test at a time, beside all others.

    Other files are each a group. (Not by pytest-xdist's marks for groups, which pytest 9.2 does not show it.)
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
        if module.startswith(ALONE):
            return "alone"
        if module.startswith(SMALL_MODEL):
            return "small model"
        if module in SIMULATED:
            return "simulated"
        return "families" if module in FAMILIES else module


ONE_PROCESS: Final = OneProcess()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with ONE_PROCESS.holds(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    yield
    ONE_PROCESS.check()


@pytest.fixture
def one_process() -> OneProcess:
    """Who sees what a unit test starts."""
    return ONE_PROCESS


def pytest_configure(config: pytest.Config) -> None:
    """Each worker collects all tests, but begins with other ones, so that they compile files for each other."""
    if hasattr(config, "workerinput") and [Path(each).resolve() for each in config.args] == [TESTS]:
        first = BEGUN_WITH[int(config.workerinput["workerid"].removeprefix("gw")) % len(BEGUN_WITH)]
        folders = sorted(each.name for each in TESTS.iterdir() if next(each.rglob("test_*.py"), None))
        at = folders.index(first)
        config.args = [str(TESTS / each) for each in folders[at:] + folders[:at]]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Unit tests need not wait until others are collected."""
    return (config.option.markexpr == UNITS and lies_among_integration_tests(collection_path)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what shows nothing more: where `-m` asks for GPUs, and in `make fuzz`, nothing is."""
    mark_integration_tests(items)
    if "gpu" in config.option.markexpr or "DIPTYCH_FUZZ_EXAMPLES" in os.environ:
        return
    left_out = _of_gpus(items) | _beyond_pairs(items)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _of_gpus(items: list[pytest.Item]) -> set[pytest.Item]:
    """Some thousand tests that need a GPU: where there is none, to skip them one by one takes a while."""
    found = {item for item in items if item.get_closest_marker("gpu")}
    return found if found and not _has_gpu() else set()


def _beyond_pairs(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return cases of kernels on CPUs that show nothing of their parameters that others don't.

    That is a pair of values where the kernel is what serves, and a value in Triton's interpreter, which is slow.
    """
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_of_kernels = "tests/kernels/" in item.nodeid or _is_interpreted(item)
        if is_of_kernels and not item.get_closest_marker("gpu") and hasattr(item, "callspec"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = [[of[at] for at in covering([*map(_values, of)], _num_together(of[0]))] for of in products.values()]
    return {item for of in products.values() for item in of} - {item for of in kept for item in of}


def _num_together(item: pytest.Item) -> int:
    return 1 if "tests/kernels/gpu/" in item.nodeid or _is_interpreted(item) else 2


def _is_interpreted(item: Any) -> bool:
    return "device" in item.fixturenames and hasattr(item, "callspec") and item.callspec.params.get("device") == "cpu"


def _values(item: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in item.callspec.params.items()}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look through it for garbage meanwhile, again and again, finds none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Thousands of items and what was imported for them: garbage collections need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # not without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    config.option.loadscopereorder = False  # in the order of files, whose last ones are short: few tests may take long
    return Groups(config, log)


@pytest.fixture(scope="session", autouse=True)
def _no_platform_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands of tests find no platform but their own, and what tests start is found by no command of the user."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="module", autouse=True)
def _no_variable_stays() -> Iterator[None]:
    """A variable that a module of tests leaves behind changes what others start, by the order in which they run."""
    before = _variables()
    yield
    assert _variables() == before


def _variables() -> dict[str, str]:
    """Return what has a say in what processes do. (UCX, once opened in this one, has set how it is to be used.)"""
    found = os.environ.items()
    return {name: value for name, value in found if name == "UCX_NET_DEVICES" or name.startswith("DIPTYCH_")}


@pytest.fixture(scope="session")
def small_model_path() -> Path:
    """SmolLM2-135M-Instruct, one GGUF file."""
    return demo.fetch(lambda what, done, total: None)


@pytest.fixture(scope="session")
def small_model(small_model_path: Path) -> ModelSource:
    """The same file, opened."""
    return open_model("smollm2")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 4 heads and 2 KV heads, in a folder; its words are w0, w1, ... A process loads it at once."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = transformers.LlamaConfig(
        vocab_size=321,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    _save_words(folder, config.vocab_size)
    return folder


@pytest.fixture(scope="session")
def tiny_tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose output projection is its embedding, with the same words."""
    settings = {"head_dim": 16, "num_hidden_layers": 3, "tie_word_embeddings": True, "max_position_embeddings": 512}
    return _tiny_folder(tmp_path_factory.mktemp("models") / "tied", "Qwen3", settings)


@pytest.fixture(scope="session")
def tiny_latent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek V3 without experts, with the same words."""
    settings = LATENT | {"num_hidden_layers": 2, "max_position_embeddings": 512, "first_k_dense_replace": 2}
    return _tiny_folder(tmp_path_factory.mktemp("models") / "latent", "DeepseekV3", settings)


@pytest.fixture(scope="session")
def tiny_sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek V3.2 without experts, whose tokens attend to four others, with the same words."""
    settings = LATENT | {"num_hidden_layers": 2, "max_position_embeddings": 512, "first_k_dense_replace": 2}
    settings |= {"index_n_heads": 8, "index_head_dim": 24, "index_topk": 4}
    return _tiny_folder(tmp_path_factory.mktemp("models") / "sparse", "DeepseekV32", settings)


@pytest.fixture(scope="session")
def tiny_experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral with three experts a layer, of which a token chooses two, with the same words."""
    settings = MOE | {"num_local_experts": 3, "num_hidden_layers": 2, "max_position_embeddings": 512}
    return _tiny_folder(tmp_path_factory.mktemp("models") / "experts", "Mixtral", settings)


@pytest.fixture(scope="session")
def tiny_six_experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 MoE whose layers have six experts, but for the second, with the same words."""
    settings = MOE | {"num_experts": 6, "moe_intermediate_size": 48, "mlp_only_layers": [1], "head_dim": 16}
    settings |= {"num_hidden_layers": 3, "max_position_embeddings": 512}
    return _tiny_folder(tmp_path_factory.mktemp("models") / "six-experts", "Qwen3Moe", settings)


@pytest.fixture(scope="session")
def tiny_latent_experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek V3 whose layers behind the first have experts, with the same words."""
    settings = DEEPSEEK | {"num_hidden_layers": 3, "max_position_embeddings": 512, "first_k_dense_replace": 1}
    settings |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    return _tiny_folder(tmp_path_factory.mktemp("models") / "latent-experts", "DeepseekV3", settings)


@pytest.fixture(scope="session")
def tiny_recurrent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen 3.5, every second layer of which keeps a state, with the same words."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    layers = {"layer_types": ["linear_attention", "full_attention"] * 2, "max_position_embeddings": 1024}
    folder = tmp_path_factory.mktemp("models") / "recurrent"
    return _tiny_folder(folder, "Qwen3_5", heads | dims | layers, config="Qwen3_5Text")


@pytest.fixture(scope="session")
def tiny_wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 4, whose layers with a window have other heads than those that see all, with the same words."""
    kinds = ["full_attention", *["sliding_attention"] * 3, "full_attention"]
    layers = {"num_hidden_layers": 5, "layer_types": kinds, "vocab_size_per_layer_input": NUM_WORDS}
    heads = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "max_position_embeddings": 512}
    folder = tmp_path_factory.mktemp("models") / "wide"
    return _tiny_folder(folder, "Gemma4", GEMMA4 | layers | heads, config="Gemma4Text")


def _tiny_folder(folder: Path, family: str, settings: Mapping[str, Any], config: str = "") -> Path:
    """Save a random model of so many words, which no token ends; `config`: where transformers calls it otherwise."""
    import torch
    import transformers

    endless = {"vocab_size": NUM_WORDS, "eos_token_id": None, "bos_token_id": None}
    torch.manual_seed(0)
    made = getattr(transformers, f"{config or family}Config")(**{**SHAPE, **settings, **endless})
    getattr(transformers, f"{family}ForCausalLM")(made).save_pretrained(folder)
    _save_words(folder, NUM_WORDS)
    return folder


def _save_words(folder: Path, vocab_size: int) -> None:
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE of 267 tokens. 0 is `</s>`, which ends a sequence; 1 is `<|x|>`, special too."""
    vocab = {"</s>": 0, "<|x|>": 1}
    for letter in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges = [pair for pair in _PAIRS if vocab.setdefault("".join(pair), len(vocab))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("</s>", "<|x|>")])
    return Tokenizer(backend, eos_ids=(0,), chat_template=None)


_PAIRS = [('"', ":"), ('"', ","), ("{", '"'), ('"', "}"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("1", "2"), ("Ġ", '"')]


@pytest.fixture(scope="session")
def write_adapter() -> Callable[..., dict[str, Any]]:
    """`write_adapter(folder, shapes, rank=4, alpha=8, seed=0, **config)`: a random PEFT adapter of these modules.

    Returns what it adds to each module's weight.
    """
    import torch
    from safetensors.torch import save_file

    def write(
        folder: Path,
        shapes: Mapping[str, tuple[int, int]],
        *,
        rank: int = 4,
        alpha: float = 8,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **config: Any,
    ) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        deltas: dict[str, torch.Tensor] = {}
        for module, (num_rows, num_columns) in shapes.items():
            a = torch.randn(rank, num_columns, generator=generator).div(num_columns**0.5).to(dtype)
            b = torch.randn(num_rows, rank, generator=generator).div(rank**0.5).to(dtype)
            prefix = f"base_model.model.{module}"
            if module.endswith("embed_tokens"):  # [vocab_size, hidden_size], whose A is of tokens
                tensors |= {
                    f"{prefix}.lora_embedding_A": b.T.contiguous(),
                    f"{prefix}.lora_embedding_B": a.T.contiguous(),
                }
            else:
                tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            deltas[module] = b.float() @ a.float() * (alpha / rank)
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = sorted({module.rpartition(".")[2] for module in shapes})
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(values | config))
        return deltas

    return write


@dataclass(frozen=True)
class Case:
    """A model of transformers: `<name>ForCausalLM` with `settings`."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    min_prompt_len: int = 1
    images: bool = False


PROMPT_LENGTHS: Final = [1, 2, 15, 16, 17, 40, 65, 150]
NUM_OUTPUT_TOKENS: Final = 6
NUM_WORDS: Final = 321  # of the models in folders
SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that neighbouring logits are far apart
    "pad_token_id": 0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [1.5, 2, 3, 4, 5, 6]}
PHI4 = {"rope_parameters": LONG | {"partial_rotary_factor": 0.75}}
MOE = {"num_experts_per_tok": 2}
GLM = MOE | {"n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 32}
GPT_OSS = MOE | {
    "num_local_experts": 4,
    "head_dim": 32,
    "sliding_window": 16,
    "rope_parameters": YARN | {"truncate": False},
    "swiglu_limit": 1.5,  # small, so that it is reached
}
LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size_mlp": 96,
    "head_dim": 32,
    "attention_chunk_size": 16,
    "floor_scale": 8,  # small, so that queries grow
    "attn_scale": 0.3,
    "rope_parameters": LLAMA3,
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "q_lora_rank": 28}
DEEPSEEK = MOE | LATENT | {"n_routed_experts": 8, "moe_intermediate_size": 24, "num_key_value_heads": 4}
INDEX = {
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 12,
    "pad_token_id": None,  # its embedding is 0, and so are all scores of a query of it: any tokens would be the best
}
LARGE4: dict[str, Any] = {key: value for key, value in (DEEPSEEK | INDEX).items() if key != "q_lora_rank"}
LARGE4 |= {"rope_parameters": YARN | {"attention_factor": 1.0, "original_max_position_embeddings": 32}}
LARGE4 |= {"index_topk": 24}  # of fewer, bfloat16 leaves little of what transformers itself computes
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32}
GROWING |= {"llama_4_scaling_beta": 0.5, "max_position_embeddings": 256}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 200,
    "hidden_size_per_layer_input": 0,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "factor": 4.0}
DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "initializer_range": 0.14,  # more, and rounding to bfloat16 leaves little of what transformers itself computes
}
GATED_MOE = MOE | {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


KIMI = (
    MOE
    | LATENT
    | {
        "q_lora_rank": None,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "moe_intermediate_size": 24,
        "linear_num_heads": 4,
        "linear_head_dim": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    }
)
NEMOTRON = MOE | {
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 20,
    "chunk_size": 32,
    "n_routed_experts": 6,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp", "moe"],
}
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "tie_word_embeddings": True}
CASES: Final = {
    "gpt oss": Case("GptOss", GPT_OSS),
    "llama": Case("Llama", {"head_dim": 64}),
    "llama, wide heads": Case("Llama", {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama, tied, one KV head": Case("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, six KV heads": Case(
        "Llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
    ),
    "llama, linear rope": Case("Llama", {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic rope": Case("Llama", {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 4.0}}),
    "llama, llama3 rope": Case("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": Case("Llama", {"rope_parameters": YARN, "head_dim": 32}),
    "llama, yarn with mscale": Case("Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama, yarn not truncated": Case("Llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16}}),
    "llama 4": Case("Llama4", LLAMA4),
    "llama 4, dense and still layers between, no norms of heads": Case(
        "Llama4",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_chunk_size": 33}
        | {"no_rope_layers": [1, 0, 0, 1], "rope_parameters": PLAIN, "head_dim": 64},
    ),
    "llama 4 with images, no temperature": Case("Llama4", LLAMA4 | {"attn_temperature_tuning": False}, images=True),
    "mistral": Case("Mistral", {"sliding_window": 20, "head_dim": 64}),
    "mistral without a window": Case("Mistral", {"sliding_window": None}),
    "qwen2": Case("Qwen2", {}),
    "qwen2 with late windows": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": Case("Qwen3", {"head_dim": 64}),
    "gemma2": Case("Gemma2", {"head_dim": 96, "sliding_window": 24, "query_pre_attn_scalar": 50}),
    "gemma2 without caps": Case("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": Case("Gemma3", {"head_dim": 256, "sliding_window": 33, "query_pre_attn_scalar": 64}),
    "gemma3 with images": Case("Gemma3", {"head_dim": 32, "sliding_window": 33}, images=True),
    "gemma3, pattern and stretched": Case(
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": PLAIN,
            },
        },
    ),
    "gemma3, groups of windows of which the last is not full": Case(
        "Gemma3",
        {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 16, "sliding_window_pattern": 3},
    ),
    "gemma4, windows and wide heads": Case("Gemma4", GEMMA4),
    "gemma4, groups of layers with heads of two widths": Case(
        "Gemma4",
        GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 128, "num_hidden_layers": 7}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2, "full_attention"]},
    ),
    "gemma4, values of keys, caps, still dimensions stretched": Case(
        "Gemma4",
        GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0}
        | {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": PROPORTIONAL}},
    ),
    "gemma4, borrowed keys, wide networks, inputs of each layer": Case(
        "Gemma4",
        GEMMA4
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
    ),
    "gemma4, experts beside a network": Case(
        "Gemma4",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 8},  # transformers does not slice inputs that are none
    ),
    "gemma4 with images and sounds": Case(
        "Gemma4",
        GEMMA4
        | {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16, "use_bidirectional_attention": "vision"}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
        images=True,
    ),
    "phi3": Case("Phi3", {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}, "sliding_window": 40}),
    "phi3, rope for short texts": Case("Phi3", PHI4 | {"original_max_position_embeddings": 256}),
    "phi3, rope for long texts": Case("Phi3", PHI4 | {"original_max_position_embeddings": 32}, min_prompt_len=33),
    "deepseek v3": Case(
        "DeepseekV3", DEEPSEEK | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "n_shared_experts": 2}
    ),
    "deepseek v3, one query projection, halves, no groups": Case(
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 30, "qk_rope_head_dim": 14},
    ),
    "deepseek v3, yarn with mscale": Case(
        "DeepseekV3",
        DEEPSEEK | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "deepseek v3.2": Case(
        "DeepseekV32",
        DEEPSEEK | INDEX | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "num_hidden_layers": 3},
    ),
    "deepseek v3.2, yarn, every layer has experts": Case(
        "DeepseekV32",
        DEEPSEEK
        | INDEX
        | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["sparse"] * 2, "num_hidden_layers": 2}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "glm moe dsa, layers that share a choice": Case(
        "GlmMoeDsa", DEEPSEEK | INDEX | {"indexer_types": ["full", "shared", "shared", "full"]}
    ),
    "kimi k2.5 with images": Case(
        "Kimi_K25", DEEPSEEK | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}, images=True
    ),
    "glm4 moe": Case("Glm4Moe", GLM | {"attention_bias": True}),
    "glm4 moe, groups, normed heads": Case(
        "Glm4Moe",
        GLM
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 2}
        | {"use_qk_norm": True, "norm_topk_prob": False, "routed_scaling_factor": 1.8},
    ),
    "glm4 moe lite": Case("Glm4MoeLite", DEEPSEEK | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    "mistral4, groups": Case(
        "Mistral4",
        DEEPSEEK
        | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2}
        | {"rope_parameters": GROWING},
    ),
    "mistral4, one query projection, halves, shares as they are": Case(
        "Mistral4",
        DEEPSEEK
        | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "routed_scaling_factor": 1.8}
        | {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.1}},
    ),
    "mistral large 4 with images": Case("MistralLarge4", LARGE4, images=True),
    "mistral large 4 with images, layers that share a choice, or latents, or both; groups": Case(
        "MistralLarge4",
        LARGE4
        | {"indexer_types": ["full", "shared", "full", "shared"], "kv_source_layers": [0, 1, 0, 1]}
        | {"no_rope_layers": [1, 0, 1, 0], "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.8},
        images=True,
    ),
    "ministral, windows in some layers": Case(
        "Ministral",
        {"sliding_window": 20, "layer_types": ["full_attention", *["sliding_attention"] * 3], "head_dim": 32},
    ),
    "ministral3": Case("Ministral3", {"head_dim": 32, "rope_parameters": GROWING}),
    "ministral3 with images, tied, a window": Case(
        "Mistral3",
        {"head_dim": 32, "rope_parameters": GROWING, "sliding_window": 24, "tie_word_embeddings": True},
        images=True,
    ),
    "seed oss": Case("SeedOss", {"head_dim": 32}),
    "seed oss, all biases": Case("SeedOss", {"head_dim": 24, "attention_out_bias": True}),
    "glm4": Case("Glm4", {"head_dim": 32}),
    "ernie4.5": Case("Ernie4_5", {"head_dim": 32}),
    "ernie4.5 moe": Case(
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 32, "moe_num_shared_experts": 2},
    ),
    "exaone4": Case("Exaone4", {"sliding_window": 20, "head_dim": 32}),
    "olmo2": Case("Olmo2", {}),
    "olmo3": Case(
        "Olmo3",
        {
            "sliding_window": 16,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    "granite": Case(
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "minimax m2": Case(
        "MiniMaxM2",
        {"num_local_experts": 6, "head_dim": 32, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}} | MOE,
    ),
    "mixtral": Case("Mixtral", {"num_local_experts": 4} | MOE),
    "qwen2 moe": Case(
        "Qwen2Moe",
        {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40} | MOE,
    ),
    "qwen2 moe, normalised, no bias, every second layer": Case(
        "Qwen2Moe",
        {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
        | {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2}
        | MOE,
    ),
    "qwen3 moe": Case("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 48, "head_dim": 16} | MOE),
    "qwen3 moe, normalised, some layers dense": Case(
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1]} | MOE,
    ),
    "qwen3 next": Case("Qwen3Next", DELTA_NET | GATED_MOE),
    "qwen3 next, one value head a key head, some layers dense, shares as they are": Case(
        "Qwen3Next",
        DELTA_NET
        | GATED_MOE
        | {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "mlp_only_layers": [0], "norm_topk_prob": False}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "qwen3.5 with images, tied": Case(
        "Qwen3_5",
        DELTA_NET
        | {"tie_word_embeddings": True}
        | {"rope_parameters": PLAIN | SECTIONS | {"partial_rotary_factor": 0.25}},
        images=True,
    ),
    "qwen3.5 moe": Case("Qwen3_5Moe", DELTA_NET | GATED_MOE),
    "kimi linear": Case("KimiLinear", KIMI),
    "kimi linear, groups, two shared experts, dense between, the last one attends": Case(
        "KimiLinear",
        KIMI
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False, "linear_conv_kernel_dim": 3}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
        | {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
    "nemotron": Case("Nemotron", {"head_dim": 24}),
    "nemotron, all of each head rotated": Case(
        "Nemotron", {"head_dim": 32, "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}}
    ),
    "nemotron h": Case("NemotronH", NEMOTRON),
    "nemotron h, latent experts in groups, long steps, a convolution without bias": Case(
        "NemotronH",
        NEMOTRON
        | {"moe_latent_size": 28, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.8, "norm_topk_prob": False}
        | {"time_step_min": 0.3, "use_conv_bias": False, "conv_kernel": 2}
        | {
            "layers_block_type": [
                "moe",
                "linear_attention",
                "full_attention",
                "linear_attention",
                "mlp",
                "linear_attention",
            ]
        },
    ),
    "lfm2": Case("Lfm2", LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2, biases, another size of networks, not tied": Case(
        "Lfm2", LFM2 | {"conv_bias": True, "block_multiple_of": 16, "tie_word_embeddings": False, "conv_L_cache": 4}
    ),
    "lfm2 moe": Case("Lfm2Moe", LFM2 | MOE | {"num_experts": 6, "moe_intermediate_size": 24, "num_dense_layers": 1}),
    "lfm2 moe, no bias of the choice, shares as they are": Case(
        "Lfm2Moe",
        LFM2
        | MOE
        | {"num_experts": 6, "moe_intermediate_size": 24, "num_dense_layers": 2, "use_expert_bias": False}
        | {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
}


ATTENDS, MIXES, SLIDES = "full_attention", "linear_attention", "sliding_attention"
KINDS: Final = [MIXES, ATTENDS, MIXES, MIXES, ATTENDS, ATTENDS, MIXES]
SEVEN: Final = {"num_hidden_layers": len(KINDS), "layer_types": KINDS}
LONGER: Final = {  # with layers of each kind for three stages, of which each has another number
    "qwen3.5 moe, seven layers": Case("Qwen3_5Moe", DELTA_NET | GATED_MOE | SEVEN),
    "kimi linear, seven layers": Case("KimiLinear", KIMI | SEVEN),
    "nemotron h, ten layers": Case(
        "NemotronH",
        NEMOTRON | {"layers_block_type": [MIXES, ATTENDS, "moe", MIXES, "mlp", ATTENDS, MIXES, MIXES, ATTENDS, "moe"]},
    ),
    "mistral large 4 with images, six layers": Case(
        "MistralLarge4",
        LARGE4
        | {"num_hidden_layers": 6, "indexer_types": ["full", "shared"] * 3, "kv_source_layers": [0, 1, 2, 3, 2, 3]}
        | {"no_rope_layers": [1, 0] * 3, "mlp_layer_types": ["sparse", "dense"] * 3},
        images=True,
    ),
    "gpt oss, six layers": Case("GptOss", GPT_OSS | {"num_hidden_layers": 6}),
    "olmo3, eight layers": Case(
        "Olmo3",
        {"num_hidden_layers": 8, "sliding_window": 16, "layer_types": [*[SLIDES] * 3, ATTENDS, *[SLIDES] * 3, ATTENDS]},
    ),
    "llama 4, eight layers": Case("Llama4", LLAMA4 | {"num_hidden_layers": 8}),
    "lfm2, seven layers": Case(
        "Lfm2",
        {"layer_types": [each if each == ATTENDS else "conv" for each in KINDS], "num_hidden_layers": len(KINDS)}
        | {"tie_word_embeddings": True, "block_auto_adjust_ff_dim": False},
    ),
}


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Qwen2.5-VL as a folder, with tokenizer and template, and as transformers computes it."""
    from tiny_vision import save_qwen2_5_vl

    return save_qwen2_5_vl(tmp_path_factory.mktemp("tiny-vision"))


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same of Qwen3-VL."""
    from tiny_vision import save_qwen3_vl

    return save_qwen3_vl(tmp_path_factory.mktemp("tiny-qwen3-vl"))


@pytest.fixture(scope="session")
def gemma3_vision(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same of Gemma 3."""
    from tiny_vision import save_gemma3

    return save_gemma3(tmp_path_factory.mktemp("tiny-gemma3"))


@dataclass(frozen=True)
class TinyModel:
    """A random model as transformers saved it, with what transformers computes."""

    folder: Path
    prompts: list[list[int]]
    outputs: list[list[int]]  # greedy
    logits: list[Any]  # [prompt and output tokens, vocab_size] of each


@pytest.fixture(scope="session")
def made_families() -> dict[str, TinyModel]:
    """Models by the names of their cases: tests that name some families find those that others have had made."""
    return {}


@pytest.fixture(scope="session", params=CASES)
def family_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, made_families: dict[str, TinyModel]
) -> TinyModel:
    """One of each family and of each of its variants, in several shards."""
    case = (CASES | LONGER)[request.param]
    if not _is_known(case):
        pytest.skip("this transformers knows the family not, or not yet with these settings")
    if request.param not in made_families:
        made_families[request.param] = _tiny_model(case, tmp_path_factory.mktemp("tiny"))
    return made_families[request.param]


@pytest.fixture(scope="session")
def family_configs() -> dict[str, ModelConfig]:
    """What each of them is read as, of those that this transformers knows; nothing is computed."""
    known = {name: case for name, case in CASES.items() if _is_known(case)}
    return {name: from_hf(_family_config(case).to_dict(), {}, name) for name, case in known.items()}


def _is_known(case: Case) -> bool:
    """Tell whether the installed transformers computes the case; older ones stand beside the torch of some GPUs."""
    import transformers

    made = getattr(transformers, f"{_config_name(case)}Config", None)
    return made is not None and ("swiglu_limit" not in case.settings or hasattr(made(), "swiglu_limit"))


def _tiny_model(case: Case, folder: Path) -> TinyModel:
    import torch

    model = _random_model(case)
    model.save_pretrained(folder, max_shard_size="100KB")
    lengths, random = [each for each in PROMPT_LENGTHS if each >= case.min_prompt_len], np.random.default_rng(1)
    prompts = [random.integers(0, SHAPE["vocab_size"], length).tolist() for length in lengths]
    with torch.inference_mode():
        texts = [_continued(model, prompt) for prompt in prompts]
        logits = [model(torch.tensor([text])).logits[0] for text in texts]
    outputs = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    return TinyModel(folder, prompts, outputs, logits)


def _config_name(case: Case) -> str:
    texts = {"Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text", "Llama4": "Llama4Text", "Mistral3": "Ministral3"}
    texts |= {"Kimi_K25": "DeepseekV3", "MistralLarge4": "MistralLarge4Text"}
    texts |= {"Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"}
    return texts.get(case.name, case.name)


def _family_config(case: Case) -> Any:
    """Return the configuration of the whole model, as transformers has it."""
    import transformers

    config = getattr(transformers, f"{_config_name(case)}Config")(
        **copy.deepcopy(SHAPE | case.settings)
    )  # it adds to them
    whole = _with_images(case, config) if case.images else config
    whole.architectures = [_class_name(case)]
    whole._attn_implementation = "eager"  # the one that knows soft caps
    return whole


def _class_name(case: Case) -> str:
    return f"{case.name}{'ForConditionalGeneration' if case.images else 'ForCausalLM'}"


def _random_model(case: Case) -> Any:
    """Norms and biases are random as well."""
    import torch
    import transformers

    config = _family_config(case)
    torch.manual_seed(0)
    model = getattr(transformers, _class_name(case))(config)
    saved = set(model.state_dict())
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("_bias")]  # of experts
    vectors = [each for each in (*model.parameters(), *buffers) if each.dim() == 1]
    for parameter in (*vectors, *biases):
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def _with_images(case: Case, text_config: Any) -> Any:
    import transformers

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    of_family: dict[str, dict[str, Any]] = {
        "Gemma3": {"mm_tokens_per_image": 4},
        "Gemma4": {"audio_config": None},
        "Kimi_K25": {"tie_word_embeddings": False},
        "Llama4": {},
        "MistralLarge4": {},
        "Mistral3": {"tie_word_embeddings": text_config.tie_word_embeddings},
        "Qwen3_5": {"tie_word_embeddings": text_config.tie_word_embeddings},
        "Qwen3_5Moe": {},
    }
    own = of_family[case.name]
    return getattr(transformers, f"{case.name}Config")(text_config=text_config, vision_config=vision, **own)


def _continued(model: Any, prompt: list[int]) -> list[int]:
    import torch

    text = list(prompt)
    for _ in range(NUM_OUTPUT_TOKENS):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text
