"""Bugs planted in the bytes of real models' states: on their way they are refused, or else they change tokens.

So it is in a cache, and where a request computes again what it had to give up. What a state should be is computed here
by a runner of its own, after a token less or more: no test of a scheduler would see the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from diptych.architectures.recurrent import Recurrent
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch, StateMoves
from diptych.engine.values.kv_regions import cell_nbytes, pages_per_state, share_nbytes, slices
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.output import FailureCode
from diptych.kvtransfer.layout import PoolLayout

PAGE_SIZE, NUM_PAGES, NUM_TOKENS = 4, 200, 14
PROMPT: Final = [(7 * i) % 96 for i in range(23)]
OTHER: Final = [(5 * i) % 96 for i in range(23)]
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DELTA: Final = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
MAMBA: Final = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 20,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
}
CONV: Final = {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
MODELS: Final[dict[str, dict[str, Any]]] = {"Qwen3_5": DELTA, "NemotronH": MAMBA, "Lfm2": CONV}
Pair = Any  # the fixture's class: test helpers can't be imported
Patch = pytest.MonkeyPatch


class Model(NamedTuple):
    """One of `MODELS`, as it was saved."""

    source: ModelSource
    layout: PoolLayout  # of one page
    per_state: int

    @property
    def recurrent(self) -> Recurrent:
        assert self.source.config.recurrent is not None
        return self.source.config.recurrent

    def new(self, num_pages: int) -> tuple[Any, ModelRunner]:
        """Return a pool, and what computes on it, whose slots hold nonsense."""
        layout = dataclasses.replace(self.layout, num_pages=num_pages)
        kv = np.zeros(layout.shape, np.float32)
        runner = ModelRunner(self.source, torch.from_numpy(kv), dtype="float32", max_requests=16)
        states = runner.model.states
        assert states is not None
        states._slots.view(torch.float32).fill_(40.0)  # much: models forget what was long ago
        return kv, runner

    def state_after(self, tokens: list[int]) -> Any:
        """Return the pages that hold it, `[per_state, ...]`."""
        num_pages = -(-len(tokens) // PAGE_SIZE)
        kv, runner = self.new(1 + num_pages + self.per_state)
        pages, positions = np.arange(1, 1 + num_pages), np.arange(len(tokens))
        zero, one = np.zeros(1, np.int64), np.array([len(tokens)])
        moves = StateMoves(
            slots=zero,
            cleared=zero,
            read_slots=zero[:0],
            read_pages=np.zeros((0, self.per_state), np.int32),
            written_slots=zero,
            written_pages=np.arange(1 + num_pages, len(kv), dtype=np.int32)[None],
        )
        slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        table = pages[None].astype(np.int32)
        step = ForwardBatch(
            ForwardMode.EXTEND, np.array(tokens), positions, slots, table, one, one, zero + 1, states=moves
        )
        runner.execute(step, SamplingBatch.alike(1, 0.0))
        return kv[1 + num_pages :].copy()


def saved(family: str, folder: Path) -> Model:
    torch.manual_seed(0)
    config_name = {"Qwen3_5": "Qwen3_5Text"}.get(family, family)
    config = getattr(transformers, f"{config_name}Config")(**SHAPE | MODELS[family])
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    source = open_model(str(folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=1, page_size=PAGE_SIZE, dtype="float32")
    return Model(source, layout, pages_per_state(source.config, 1, "float32", layout))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return saved(request.param, tmp_path_factory.mktemp("model"))


# what can become of a state: of the pages that held something before, and what should be there, after some tokens


def dropped(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    return before


def first_page_dropped(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    return np.concatenate([before[:1], arrived[1:]])


def zeroed(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    return np.zeros_like(arrived)


def pages_in_another_order(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    return arrived[::-1]


def a_token_short(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    return model.state_after(tokens[:-1])


def advanced_twice(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    return model.state_after([*tokens, tokens[-1]])


def of_a_stale_slot(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    return model.state_after(OTHER)


def layers_in_another_order(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    flat = arrived.view(np.uint8).ravel().copy()
    for section in sections(model, flat):
        section[:] = section[:, ::-1].copy()
    return flat.view(np.float32).reshape(arrived.shape)


def newest_inputs_forgotten(model: Model, before: Any, arrived: Any, tokens: list[int]) -> Any:
    """Those of the convolutions, which are the first part of a layer's; what else there is stays."""
    flat = arrived.view(np.uint8).ravel().copy()
    for section in sections(model, flat)[: len(model.recurrent.mixer.state_parts[0].sections)]:
        section[:] = 0
    return flat.view(np.float32).reshape(arrived.shape)


def sections(model: Model, flat: Any) -> list[Any]:
    """Return views of what units have of each section of a state, `[num_units, num_layers, nbytes]`."""
    num_layers, state = len(model.recurrent.layers), flat[: share_nbytes(model.recurrent, "float32")]
    cells = state.reshape(-1, num_layers, cell_nbytes(model.recurrent, "float32"))
    return [cells[..., first : first + nbytes] for _, first, nbytes in slices(model.recurrent, "float32")]


Mutant = Callable[[Model, Any, Any, list[int]], Any]
MUTANTS: Final[tuple[Mutant, ...]] = (
    dropped,
    first_page_dropped,
    zeroed,
    pages_in_another_order,
    a_token_short,
    advanced_twice,
    of_a_stale_slot,
    layers_in_another_order,
    newest_inputs_forgotten,
)
planted = pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])


@pytest.fixture
def new_pair(make_pair: Any, model: Model) -> Callable[..., Pair]:
    """`new_pair(integrity, mutant=None)`: a pair in which states that arrive go through `mutant`."""

    class Damaging(make_pair):  # type: ignore[misc]  # a fixture has no type
        mutant: Mutant | None = None
        num_states = 0  # that arrived

        def _copy(self, side: Any, other: Any, write: Any) -> None:
            self._before = other.kv[write.dst].copy()
            super()._copy(side, other, write)

        def _damage(self, other: Any, pages: Any) -> None:
            rooms = [room for room in other.core._rooms if len(room.granted)]
            is_state = any(room.granted[-model.per_state :].tolist() == pages.tolist() for room in rooms)
            self.num_states += is_state
            if is_state and self.mutant is not None:
                other.kv[pages] = self.mutant(model, self._before, other.kv[pages].copy(), PROMPT)

    def new(integrity: Any, mutant: Mutant | None = None, **options: Any) -> Pair:
        pair = Damaging(
            prefill_pages=NUM_PAGES,
            decode_pages=NUM_PAGES,
            max_step_tokens=64,
            model=model.new,
            rules=TransferRules(integrity=integrity),
            vocab_size=96,
            pages_per_state=model.per_state,
            **options,
        )
        pair.mutant = mutant
        return pair

    return new


def generated(pair: Pair, room: int, prompt: list[int] = PROMPT) -> list[int]:
    pair.start(room, prompt, max_tokens=NUM_TOKENS)
    pair.run()
    tokens: list[int] = pair.tokens(room)
    return tokens


@planted
def test_what_arrives_damaged_is_refused(new_pair: Callable[..., Pair], mutant: Mutant) -> None:
    pair = new_pair("always", mutant)
    generated(pair, 1)
    assert pair.num_states == 1
    assert pair.decode.ended(1).failure.code is FailureCode.TRANSFER_FAILED
    pair.assert_clean()


@planted
def test_without_digests_it_changes_tokens(new_pair: Callable[..., Pair], mutant: Mutant) -> None:
    tokens = generated(new_pair("off", mutant), 1)
    assert len(tokens) == NUM_TOKENS
    assert tokens != generated(new_pair("always"), 1)


@planted
def test_in_a_cache_it_changes_tokens(new_pair: Callable[..., Pair], model: Model, mutant: Mutant) -> None:
    """The prompt begins with the state behind its last whole page, when it comes again."""
    pair, expected = new_pair("off"), generated(new_pair("always"), 1)
    assert generated(pair, 1) == expected
    computed = pair.prefill.runner.num_tokens
    assert generated(pair, 2) == expected
    assert pair.prefill.runner.num_tokens - computed == len(PROMPT) % PAGE_SIZE
    (node,) = pair.prefill.cache.tree.states.nodes
    right = pair.prefill.kv[node.state].copy()
    tokens = PROMPT[: node.end * PAGE_SIZE]
    np.testing.assert_allclose(right.ravel(), model.state_after(tokens).ravel(), atol=1e-4, equal_nan=True)
    pair.prefill.kv[node.state] = mutant(model, np.zeros_like(right), right.copy(), tokens)
    assert generated(pair, 3) != expected


def forgetting(*fields: str) -> Callable[[StateMoves], StateMoves]:
    def change(moves: StateMoves) -> StateMoves:
        return dataclasses.replace(moves, **{name: getattr(moves, name)[:0] for name in fields})

    return change


OF_STEPS: Final = {
    "never cleared": forgetting("cleared"),
    "never read": forgetting("read_slots", "read_pages"),
    "never written": forgetting("written_slots", "written_pages"),
}


@pytest.mark.parametrize("change", [None, *OF_STEPS])
def test_what_was_retracted_computes_the_same_again_unless_its_slot_is_stale(
    new_pair: Callable[..., Pair], squeeze: Any, monkeypatch: Patch, change: str | None
) -> None:
    prompt = PROMPT[:3]  # no longer, for a model of short convolutions forgets what it began with
    expected = generated(new_pair("always"), 1, prompt)
    if change is not None:
        monkeypatch.setattr(ModelRunner, "logits", changed(ModelRunner.logits, OF_STEPS[change]))
    pair = new_pair("off", check_every=1 << 30)  # the books don't know who else takes pages
    pair.start(1, prompt, max_tokens=NUM_TOKENS)
    while len(pair.tokens(1)) < 4:
        for move in (pair.deliver, pair.step):
            move(pair.prefill), move(pair.decode)
    others = squeeze(pair.decode.cache)
    others.toggle()
    for _ in range(PAGE_SIZE + 1):  # until it needs a page
        pair.step(pair.decode)
    assert pair.decode.core.report().counts.retractions == 1
    others.release()
    pair.expire()
    pair.run()
    assert (pair.tokens(1) == expected) == (change is None)
    pair.assert_clean()


def changed(logits: Any, change: Callable[[StateMoves], StateMoves]) -> Any:
    def plant(self: Any, batch: ForwardBatch) -> Any:
        assert batch.states is not None
        return logits(self, dataclasses.replace(batch, states=change(batch.states)))

    return plant


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 23])
def test_the_bytes_on_the_wire_are_those_of_the_prompt_s_pages_and_of_one_state(
    new_pair: Callable[..., Pair], model: Model, prompt_len: int
) -> None:
    pair = new_pair("always")
    generated(pair, 1, PROMPT[:prompt_len])
    page, state = model.layout.page_nbytes, share_nbytes(model.recurrent, "float32")
    assert model.per_state * page - state in range(page)
    expected = -(-prompt_len // PAGE_SIZE) + model.per_state
    assert pair.num_written == expected
    stats = [output.stats for output in itertools.chain(*(side.outputs[1] for side in (pair.prefill, pair.decode)))]
    assert {each.pages_moved for each in stats if each is not None} == {expected}
