"""Prompts and output of one small random model of each kind of family, against transformers.

Both sides have the same float32 weights and one thread, and take turns; the best of several rounds counts. Ours is the
embedded engine with its scheduler, its paged KV and its process; transformers is bare forward passes of one batch,
without the cost of its `generate` loop. The limit of a row is transformers.

    python bench/families.py [--quick] [--json]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
import transformers
from report import Report, arguments

from diptych.common.arrays import I64
from diptych.engine import Engine, EngineOptions, SamplingParams

PROMPT_LEN: Final = 512
BATCH_SIZE: Final = 4
CONTEXT: Final = 64
NUM_OUTPUT_TOKENS: Final = 32
NUM_MADE: Final = BATCH_SIZE * NUM_OUTPUT_TOKENS
VOCAB_SIZE: Final = 8192

SHAPE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
LATENT: Final = {
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 8,
    "head_dim": 32,
}
DELTA: Final = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
}
FAMILIES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "Llama": ("Llama", {}),
    "Gemma 3, windows": ("Gemma3Text", {"sliding_window": 128}),
    "Qwen3 MoE": ("Qwen3Moe", EXPERTS | {"num_experts": 16, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "gpt-oss": ("GptOss", {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 256}),
    "DeepSeek V3": ("DeepseekV3", EXPERTS | LATENT | {"n_routed_experts": 16, "first_k_dense_replace": 2}),
    "Qwen3.5": ("Qwen3_5Text", DELTA),
    "Qwen3-Next": ("Qwen3Next", DELTA | EXPERTS | {"num_experts": 16, "shared_expert_intermediate_size": 256}),
    "Kimi Linear": (
        "KimiLinear",
        EXPERTS
        | LATENT
        | {"q_lora_rank": None, "num_local_experts": 16, "linear_num_heads": 8, "linear_head_dim": 64}
        | {"layer_types": DELTA["layer_types"]},
    ),
    "Nemotron-H": (
        "NemotronH",
        {"mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 4, "ssm_state_size": 64, "chunk_size": 128}
        | {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]},
    ),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention"] * 2}),
}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=FAMILIES, action="append", help="measure these alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    names = options.only or list(FAMILIES)[:: 3 if options.quick else 1]
    with Report(as_json=options.json) as report, tempfile.TemporaryDirectory() as folder:
        for name in names:
            measure(report, name, Path(folder) / name, rounds=2 if options.quick else 4)


def measure(report: Report, name: str, folder: Path, rounds: int) -> None:
    peer = random_model(name, folder)
    prompts = np.random.default_rng(0).integers(1, VOCAB_SIZE, (rounds, PROMPT_LEN))
    with Engine(str(folder), EngineOptions(num_threads=1, kv_cache_mib=256)) as engine:
        pairs = [(run_ours(engine, prompt), run_theirs(peer, prompt)) for prompt in prompts]
    ours, theirs = (np.min([pair[side] for pair in pairs], axis=0) for side in range(2))
    for what, num_tokens, own_s, peer_s in zip(("prompt", "output"), (PROMPT_LEN, NUM_MADE), ours, theirs, strict=True):
        report.row(
            "families",
            f"{name}, {what}",
            num_tokens / own_s,
            "tokens/s",
            num_tokens / peer_s,
            "transformers",
            peer_s / own_s,
        )


def random_model(name: str, folder: Path) -> Any:
    """Write a model of the family, and return it as transformers computes it."""
    family, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **settings})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return model


def run_ours(engine: Engine, prompt: I64) -> tuple[float, float]:
    """Return the seconds of a prompt, and of the outputs of a batch but their first tokens."""
    prompt_s = _timed(lambda: engine.generate(prompt.tolist(), _greedy(1)))
    batch = [part.tolist() for part in _batch(prompt)]
    engine.generate_batch(batch, _greedy(1))  # both times behind the same cached prompts
    first_s = _timed(lambda: engine.generate_batch(batch, _greedy(1)))
    all_s = _timed(lambda: engine.generate_batch(batch, _greedy(1 + NUM_OUTPUT_TOKENS)))
    return prompt_s, all_s - first_s


def run_theirs(model: Any, prompt: I64) -> tuple[float, float]:
    """The same of transformers."""
    ids = torch.from_numpy(prompt)[None]
    prompt_s = _timed(lambda: model(ids, use_cache=True, logits_to_keep=1))
    made = model(torch.from_numpy(_batch(prompt)), use_cache=True, logits_to_keep=1)

    def go_on() -> None:
        step = made
        for _ in range(NUM_OUTPUT_TOKENS):
            newest = step.logits[:, -1:].argmax(-1)
            step = model(newest, past_key_values=made.past_key_values, use_cache=True)

    return prompt_s, _timed(go_on)


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def _batch(prompt: I64) -> I64:
    """Return `[BATCH_SIZE, CONTEXT]` prompts that are parts of one."""
    return prompt[: BATCH_SIZE * CONTEXT].reshape(BATCH_SIZE, CONTEXT)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
