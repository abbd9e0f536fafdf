"""Bugs that are planted in index keys alone: on their way they are refused, or else they change tokens; so in a cache.

Index keys lie behind the latents of a page and are read by nobody but the indexer: where they are wrong, attention is
as good as ever, to the wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.output import FailureCode

PAGE_SIZE, NUM_PAGES, NUM_TOKENS, NUM_LAYERS, INDEX_DIM = 4, 64, 6, 2, 24
PROMPT = [(7 * i) % 96 for i in range(23)]
Keys = np.ndarray[Any, Any]  # [num_pages, NUM_LAYERS, PAGE_SIZE, INDEX_DIM]


def dropped(before: Keys, arrived: Keys) -> Keys:
    """The first pages keep what they had."""
    return np.concatenate([before[:3], arrived[3:]])


def zeroed(before: Keys, arrived: Keys) -> Keys:
    return np.zeros_like(arrived)


def shifted(before: Keys, arrived: Keys) -> Keys:
    """Every key lies where the next token's should, and the last one of a page is lost."""
    return np.concatenate([before[:, :, :1], arrived[:, :, :-1]], axis=2)


def in_another_order_of_layers(before: Keys, arrived: Keys) -> Keys:
    return arrived[:, ::-1]


def in_another_order_of_pages(before: Keys, arrived: Keys) -> Keys:
    return arrived[::-1]


MUTANTS = [dropped, zeroed, shifted, in_another_order_of_layers, in_another_order_of_pages]
Mutant = Callable[[Keys, Keys], Keys]
planted = pytest.mark.parametrize("mutant", MUTANTS, ids=[each.__name__ for each in MUTANTS])


def damaged(mutant: Mutant, before: Any, arrived: Any) -> Any:
    """Return whole pages, `[num_pages, num_cells]`, whose index keys went through `mutant`."""
    start = arrived.shape[1] - NUM_LAYERS * PAGE_SIZE * INDEX_DIM
    keys = (pages[:, start:].reshape(-1, NUM_LAYERS, PAGE_SIZE, INDEX_DIM) for pages in (before, arrived))
    return np.concatenate([arrived[:, :start], mutant(*keys).reshape(len(arrived), -1)], axis=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    config = transformers.DeepseekV32Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        first_k_dense_replace=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=28,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        index_n_heads=8,
        index_head_dim=INDEX_DIM,
        index_topk=4,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sparse")
    transformers.DeepseekV32ForCausalLM(config).save_pretrained(folder)
    return open_model(str(folder))


@pytest.fixture
def new_pair(source: ModelSource, make_pair: Any) -> Any:
    """`new_pair(integrity, mutant=None)`: a pair in which the index keys that arrive go through `mutant`."""

    def new_model(num_pages: int) -> tuple[Any, ModelRunner]:
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
        kv = np.zeros(layout.shape, np.float32)
        return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32")

    class Damaging(make_pair):  # type: ignore[misc]  # a fixture has no type
        mutant: Mutant | None = None

        def _copy(self, side: Any, other: Any, write: Any) -> None:
            self._before = other.kv[write.dst].copy()
            super()._copy(side, other, write)

        def _damage(self, other: Any, pages: Any) -> None:
            if self.mutant is not None:
                other.kv[pages] = damaged(self.mutant, self._before, other.kv[pages].copy())

    def new(integrity: Any, mutant: Mutant | None = None) -> Any:
        pair = Damaging(
            prefill_pages=NUM_PAGES,
            decode_pages=NUM_PAGES,
            max_step_tokens=64,
            model=new_model,
            rules=TransferRules(integrity=integrity),
        )
        pair.mutant = mutant
        return pair

    return new


def generated(pair: Any, room: int) -> list[int]:
    pair.start(room, PROMPT, max_tokens=NUM_TOKENS)
    pair.run()
    tokens: list[int] = pair.tokens(room)
    return tokens


@pytest.fixture
def expected(new_pair: Any) -> list[int]:
    return generated(new_pair("always"), 1)


@planted
def test_what_arrives_damaged_is_refused(new_pair: Any, mutant: Mutant) -> None:
    pair = new_pair("always", mutant)
    generated(pair, 1)
    assert pair.decode.ended(1).failure.code is FailureCode.TRANSFER_FAILED
    pair.assert_clean()


@planted
def test_without_digests_it_changes_tokens(new_pair: Any, expected: list[int], mutant: Mutant) -> None:
    tokens = generated(new_pair("off", mutant), 1)
    assert len(tokens) == NUM_TOKENS
    assert tokens != expected


@planted
def test_in_a_cache_it_changes_tokens(new_pair: Any, expected: list[int], mutant: Mutant) -> None:
    """The prompt's pages are read a second time, on both sides, by the same prompt."""
    pair = new_pair("off")
    assert generated(pair, 1) == generated(pair, 2) == expected
    for side in (pair.prefill, pair.decode):
        used = np.flatnonzero(side.kv.any(axis=1))
        assert len(used) >= len(PROMPT) // PAGE_SIZE
        side.kv[used] = damaged(mutant, np.zeros_like(side.kv[used]), side.kv[used].copy())
    assert generated(pair, 3) != expected
