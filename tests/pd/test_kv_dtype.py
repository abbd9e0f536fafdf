"""A pair whose keys and values are narrow: tokens are those of one pass over the whole text with the same type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.kv_pool import KV_DTYPES
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode

PAGE_SIZE, NUM_PAGES, NUM_TOKENS = 4, 64, 8
PROMPTS = [[5, 9, 2], list(range(40, 79)), [7] * 21]


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    return open_model(str(tmp_path))


def new_model(source: ModelSource, kv_dtype: str, num_pages: int) -> tuple[Any, ModelRunner]:
    layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=kv_dtype)
    pages = np.zeros((num_pages, layout.page_nbytes), np.uint8)
    kv = torch.from_numpy(pages).view(-1).view(KV_DTYPES[kv_dtype]).view(layout.shape)
    return pages, ModelRunner(source, kv, dtype="float32")


def continued(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """Compute the whole text anew for every token."""
    text = list(prompt)
    for _ in range(NUM_TOKENS):
        positions = np.arange(len(text))
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=np.array(text),
            positions=positions,
            out_slots=positions,
            page_table=np.arange(NUM_PAGES, dtype=np.int32)[None],
            seq_lens=np.array([len(text)]),
            extend_lens=np.array([len(text)]),
            num_sampled=np.ones(1, np.int64),
        )
        text.append(int(runner.logits(batch).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_of_any_type_cross_and_give_the_same_tokens(source: ModelSource, make_pair: Any, kv_dtype: str) -> None:
    pair = make_pair(max_step_tokens=16, model=lambda num_pages: new_model(source, kv_dtype, num_pages))
    for room, prompt in enumerate(PROMPTS, 1):
        pair.start(room, prompt, max_tokens=NUM_TOKENS)
    pair.run()
    _, alone = new_model(source, kv_dtype, NUM_PAGES)
    assert [pair.tokens(room) for room in (1, 2, 3)] == [continued(alone, prompt) for prompt in PROMPTS]
    pair.assert_clean()
