"""Models for every component's tests: the real small one, fetched at the first use, and a tiny random one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from diptych.engine.loader import demo
from diptych.engine.loader.source import ModelSource, open_model
from diptych.engine.loader.tokenizer import Tokenizer


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
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


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
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            deltas[module] = b.float() @ a.float() * (alpha / rank)
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = sorted({module.rpartition(".")[2] for module in shapes})
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(values | config))
        return deltas

    return write
