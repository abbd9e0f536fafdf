"""Families whose layers keep states against transformers: the decoder on a KV pool, states in plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import open_model
from diptych.engine.attention.staged_batch import logits_rows, stage
from diptych.engine.models.layers.kimi_delta_rule import CHUNK
from diptych.engine.values.batch import ForwardMode

NewDriver = Callable[..., Any]
NUM_SLOTS = 12


class States:
    """What layers keep, in slots that hold anything until a request begins there."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        assert config.recurrent is not None
        self._parts = {
            layer: tuple(
                torch.full((NUM_SLOTS, *part.shape), torch.nan, dtype=torch.float32 if part.is_wide else dtype)
                for part in config.recurrent.mixer.state_parts
            )
            for layer in config.recurrent.layers
        }

    def of(self, layer: int) -> tuple[Tensor, ...]:
        return self._parts[layer]

    def begin(self, slot: int) -> None:
        for parts in self._parts.values():
            for part in parts:
                part[slot] = 0


class RecurrentDriver:
    """Runs batches of a driver with states: each request has the next slot from behind."""

    def __init__(self, driver: Any, dtype: torch.dtype = torch.float32) -> None:
        self._driver = driver
        self._model = driver.runner._model
        self._states = States(self._model.config, dtype)
        self._slots: dict[int, int] = {}
        self._free = list(range(NUM_SLOTS))

    def run(self, mode: ForwardMode, chunks: Mapping[int, list[int]]) -> Tensor:
        """Return the logits behind the last token of each."""
        for request in chunks:
            if request not in self._slots:
                self._slots[request] = self._free.pop()
                self._states.begin(self._slots[request])
        batch = self._driver.batch(mode, chunks)
        with torch.inference_mode():
            slots = torch.tensor([self._slots[request] for request in chunks])
            staged = replace(stage(batch, torch.device("cpu")), state_slots=slots)
            self._model.attention.init_forward_metadata(staged)
            self._model.loras.begin(batch.adapters, batch.extend_lens, logits_rows(batch))
            logits: Tensor = self._model.decoder.forward(staged, self._model.attention, states=self._states)
            return logits

    def extend(self, chunks: Mapping[int, list[int]]) -> Tensor:
        return self.run(ForwardMode.EXTEND, chunks)

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        return self.run(ForwardMode.DECODE, {row: [token] for row, token in tokens.items()})

    def forget(self, request: int) -> None:
        self._driver.forget(request)
        self._free.append(self._slots.pop(request))


def opened(new_driver: NewDriver, model: Any, *args: Any, **kwargs: Any) -> RecurrentDriver:
    return RecurrentDriver(new_driver(open_model(str(model.folder)), *args, **kwargs))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_whole_prompts_and_decode_give_the_logits_and_the_tokens_of_transformers(
    new_driver: NewDriver, recurrent_model: Any, backend: str
) -> None:
    driver = opened(new_driver, recurrent_model, backend)
    logits = driver.extend(dict(enumerate(recurrent_model.prompts)))
    ends = [len(prompt) - 1 for prompt in recurrent_model.prompts]
    chosen = []
    for step in range(len(recurrent_model.outputs[0])):
        assert_close(logits, [theirs[end + step] for theirs, end in zip(recurrent_model.logits, ends, strict=True)])
        chosen.append(logits.argmax(-1).tolist())
        logits = driver.decode(dict(enumerate(chosen[-1])))
    assert [list(tokens) for tokens in zip(*chosen, strict=True)] == recurrent_model.outputs


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_odd_chunks_that_continue_a_state_give_the_logits_of_transformers(
    new_driver: NewDriver, recurrent_model: Any, backend: str
) -> None:
    """One of them is a token among the chunks of others."""
    driver = opened(new_driver, recurrent_model, backend)
    texts = [prompt + output for prompt, output in zip(recurrent_model.prompts, recurrent_model.outputs, strict=True)]
    long = {i: text for i, text in enumerate(texts) if len(text) > 20}
    single = min(long)
    for start, end in ((0, 7), (7, 8), (8, 15)):
        driver.extend({i: text[start:end] for i, text in long.items()})
    driver.extend({i: text[15 : 16 if i == single else 18] for i, text in long.items()})
    logits = driver.extend({i: text[16 if i == single else 18 :] for i, text in long.items()})
    assert_close(logits, [recurrent_model.logits[i][-1] for i in long])


@pytest.mark.parametrize(("size", "backend"), [(2, "cpu"), (4, "torch")])
def test_ranks_compute_what_one_does(
    new_driver: NewDriver, on_ranks: Callable[..., Any], recurrent_model: Any, size: int, backend: str
) -> None:
    def compute(communicator: Any) -> Tensor:
        driver = opened(new_driver, recurrent_model, backend, communicator=communicator)
        extended = driver.extend(dict(enumerate(recurrent_model.prompts)))
        return torch.cat([extended, driver.decode({i: 3 for i in range(len(recurrent_model.prompts))})])

    together, alone = on_ranks(size, compute), compute(None)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert together.argmax(-1).tolist() == alone.argmax(-1).tolist()


def test_a_request_has_the_same_bits_in_any_batch_and_if_its_prompt_is_cut_where_chunks_end(
    new_driver: NewDriver, recurrent_model: Any
) -> None:
    driver, cut = opened(new_driver, recurrent_model), 2 * CHUNK
    together = driver.extend(dict(enumerate(recurrent_model.prompts)))
    decoded = driver.decode({i: 3 for i in range(len(recurrent_model.prompts))})
    for i, prompt in enumerate(recurrent_model.prompts):
        driver.forget(i)
        alone = [driver.extend({i: prompt[at : at + cut]}) for at in range(0, len(prompt), cut)][-1]
        assert torch.equal(alone[0], together[i]), len(prompt)
        assert torch.equal(driver.decode({i: 3})[0], decoded[i])


def test_bfloat16_is_near_float32(new_driver: NewDriver, recurrent_model: Any) -> None:
    driver = RecurrentDriver(new_driver(open_model(str(recurrent_model.folder)), "auto", "bfloat16"), torch.bfloat16)
    rounded = driver.extend(dict(enumerate(recurrent_model.prompts)))
    assert rounded.dtype == torch.bfloat16
    ends = [len(prompt) - 1 for prompt in recurrent_model.prompts]
    exact = torch.stack([logits[end] for logits, end in zip(recurrent_model.logits, ends, strict=True)])
    assert torch.cosine_similarity(rounded.float(), exact).median() > 0.99


def assert_close(ours: Tensor, theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-3, rtol=1e-4)
