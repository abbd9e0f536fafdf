"""Tiny random models of text, and what transformers makes of rows that are given in place of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tiny_vision import VOCAB_SIZE
from vision_engine import GREEDY

from diptych.common.arrays import F32
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams
from diptych.generation.segments import content_of_rows, prompt_keys, without_pixels

WIDTH: Final = 64
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}
WINDOWED: Final = {"sliding_window": 11, "query_pre_attn_scalar": 16}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "Llama": {},
    "Gemma2": WINDOWED,
    "Gemma3": WINDOWED | {"sliding_window_pattern": 2},
    "Granite": {"embedding_multiplier": 3.0},
}


@dataclass(frozen=True)
class RowModel:
    """A random model as transformers saved it, and itself."""

    folder: Path
    theirs: Any

    def embedded(self, token_ids: Sequence[int]) -> F32:
        """Return the rows that the model makes of tokens."""
        import torch

        with torch.inference_mode():
            found: F32 = self.theirs.get_input_embeddings()(torch.tensor(list(token_ids), dtype=torch.long)).numpy()
        return found

    def logits(self, rows: F32, token_ids: Sequence[int] = ()) -> Any:
        """Return `[num_places, vocab_size]` behind rows, and tokens behind these."""
        import torch

        given = np.concatenate((rows, self.embedded(token_ids))) if token_ids else rows
        with torch.inference_mode():
            return self.theirs(inputs_embeds=torch.from_numpy(given)[None], use_cache=False).logits[0]

    def greedy(self, rows: F32, num_tokens: int) -> list[int]:
        said: list[int] = []
        for _ in range(num_tokens):
            said.append(int(self.logits(rows, said)[-1].argmax()))
        return said


def save_row_model(folder: Path, family: str) -> RowModel:
    import torch
    import transformers

    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**SHAPE, **FAMILIES[family])
    config._attn_implementation = "eager"  # the one that knows soft caps
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return RowModel(folder, model)


def rows_like(model: RowModel, seed: int, num_rows: int) -> F32:
    """Return rows about as large as those of tokens, which no token has."""
    scale = float(np.abs(model.embedded(range(20))).mean())
    return np.random.default_rng(seed).normal(0, scale, (num_rows, WIDTH)).astype(np.float32)


def request_of_rows(
    room: int,
    rows: F32,
    params: SamplingParams = GREEDY,
    *,
    said: Sequence[int] = (),
    with_data: bool = True,
    **fields: Any,
) -> Request:
    """Return the request of rows, as the worker has it that computes it, or that is sent its KV."""
    content = content_of_rows(rows)
    keys = prompt_keys(np.array(said, np.int64), [content])
    known = content if with_data else without_pixels(content)
    return new_request(room, keys, params, contents=[known], num_prior_output_tokens=len(said), **fields)
