"""Families with recurrent layers against transformers: random weights, saved by transformers, read from the folder.

The states of requests are plain tensors, as many as there are requests; a slot belongs to one request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.attention.staged_batch import stage
from diptych.engine.runner.kv_pool import DTYPES
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_part import ModelPart
from diptych.engine.tensor_parallel.communicator import Communicator
from diptych.engine.values.batch import ForwardBatch, ForwardMode
from diptych.engine.values.kv_regions import kv_layout

PAGE_SIZE: Final = 16
PAGES_A_REQUEST: Final = 16
NUM_REQUESTS: Final = 8


class PlainStates:
    """Implements `States`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        assert config.recurrent is not None
        self._parts = {
            layer: tuple(
                torch.zeros(NUM_REQUESTS, *part.shape, dtype=torch.float32 if part.is_wide else dtype)
                for part in config.recurrent.mixer.state_parts
            )
            for layer in config.recurrent.layers
        }

    def of(self, layer: int) -> tuple[Tensor, ...]:
        return self._parts[layer]


class Rig:
    """A loaded model. Requests are numbered; the slot of one is another number."""

    def __init__(
        self, source: ModelSource, backend: str, dtype: str = "float32", communicator: Communicator | None = None
    ) -> None:
        config = ModelPart.of(source, communicator).config
        layout = kv_layout(config, NUM_REQUESTS * PAGES_A_REQUEST, PAGE_SIZE, dtype)
        kv = torch.full(layout.shape, torch.nan, dtype=DTYPES[dtype])
        self._model = load_model(source, kv, ModelOptions(dtype, attention_backend=backend), communicator)
        self._states = PlainStates(config, DTYPES[dtype])
        self._lens = [0] * NUM_REQUESTS

    def extend(self, chunks: Mapping[int, list[int]], mode: ForwardMode = ForwardMode.EXTEND) -> Tensor:
        """Compute a chunk of each request; return the logits of the last token of each."""
        batch = self._batch(mode, chunks)
        with torch.inference_mode():
            slots = torch.tensor([NUM_REQUESTS - 1 - request for request in chunks])
            staged = replace(stage(batch, torch.device("cpu")), state_slots=slots)
            self._model.attention.init_forward_metadata(staged)
            self._model.loras.begin(None, batch.extend_lens, batch.sampled_tokens)
            return self._model.decoder.forward(staged, self._model.attention, states=self._states)

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        return self.extend({request: [token] for request, token in tokens.items()}, ForwardMode.DECODE)

    def _batch(self, mode: ForwardMode, chunks: Mapping[int, list[int]]) -> ForwardBatch:
        positions = [np.arange(self._lens[each], self._lens[each] + len(chunk)) for each, chunk in chunks.items()]
        slots = [each * PAGES_A_REQUEST * PAGE_SIZE + of for each, of in zip(chunks, positions, strict=True)]
        for request, chunk in chunks.items():
            self._lens[request] += len(chunk)
        pages = np.arange(NUM_REQUESTS * PAGES_A_REQUEST, dtype=np.int32).reshape(NUM_REQUESTS, -1)
        return ForwardBatch(
            mode=mode,
            input_ids=np.concatenate([np.array(chunk, np.int64) for chunk in chunks.values()]),
            positions=np.concatenate(positions),
            out_slots=np.concatenate(slots),
            page_table=pages[list(chunks)],
            seq_lens=np.array([self._lens[each] for each in chunks]),
            extend_lens=np.array([len(chunk) for chunk in chunks.values()]),
            num_sampled=np.ones(len(chunks), np.int64),
        )


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_whole_prompts_and_decode_give_the_logits_and_the_tokens_of_transformers(
    recurrent_model: Any, backend: str
) -> None:
    rig = Rig(open_model(str(recurrent_model.folder)), backend)
    logits = rig.extend(dict(enumerate(recurrent_model.prompts)))
    ends = [len(prompt) - 1 for prompt in recurrent_model.prompts]
    chosen = []
    for step in range(len(recurrent_model.outputs[0])):
        assert_close(logits, [theirs[end + step] for theirs, end in zip(recurrent_model.logits, ends, strict=True)])
        chosen.append(logits.argmax(-1).tolist())
        logits = rig.decode(dict(enumerate(chosen[-1])))
    assert [list(tokens) for tokens in zip(*chosen, strict=True)] == recurrent_model.outputs


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_odd_chunks_give_the_logits_of_transformers(recurrent_model: Any, backend: str) -> None:
    """Single tokens and chunks that are shorter than the convolution is wide among them."""
    rig = Rig(open_model(str(recurrent_model.folder)), backend)
    texts = [prompt + output for prompt, output in zip(recurrent_model.prompts, recurrent_model.outputs, strict=True)]
    long = {i: text for i, text in enumerate(texts) if len(text) > 20}
    for start, end in ((0, 2), (2, 3), (3, 10), (10, 11), (11, None)):
        logits = rig.extend({i: text[start:end] for i, text in long.items()})
    assert_close(logits, [recurrent_model.logits[i][-1] for i in long])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_ranks_compute_what_one_does(on_ranks: Callable[..., Any], recurrent_model: Any, backend: str) -> None:
    source = open_model(str(recurrent_model.folder))

    def compute(communicator: Any) -> Tensor:
        rig = Rig(source, backend, communicator=communicator)
        extended = rig.extend(dict(enumerate(recurrent_model.prompts)))
        return torch.cat([extended, rig.decode({i: 3 for i in range(len(recurrent_model.prompts))})])

    together, alone = on_ranks(2, compute), compute(None)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert together.argmax(-1).tolist() == alone.argmax(-1).tolist()


def test_a_request_has_the_same_bits_in_any_batch_and_however_its_prompt_is_cut(recurrent_model: Any) -> None:
    source = open_model(str(recurrent_model.folder))
    together = Rig(source, "cpu").extend(dict(enumerate(recurrent_model.prompts)))
    alone = Rig(source, "cpu")
    for i, prompt in enumerate(recurrent_model.prompts):
        parts = [alone.extend({i: prompt[at : at + 29]}) for at in range(0, len(prompt), 29)]
        assert torch.equal(parts[-1][0], together[i])


def test_bfloat16_is_near_float32(recurrent_model: Any) -> None:
    rounded = Rig(open_model(str(recurrent_model.folder)), "torch", "bfloat16").extend(
        dict(enumerate(recurrent_model.prompts))
    )
    assert rounded.dtype == torch.bfloat16
    ends = [len(prompt) - 1 for prompt in recurrent_model.prompts]
    exact = torch.stack([logits[end] for logits, end in zip(recurrent_model.logits, ends, strict=True)])
    assert torch.cosine_similarity(rounded.float(), exact).median() > 0.99


def assert_close(ours: Tensor, theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-3, rtol=1e-4)
