from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Heads as kernels have them: 8 of 64, in groups of 4."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=321,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "grouped"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    return path
