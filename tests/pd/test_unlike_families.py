"""Model families on pairs whose pages or ranks differ: the tokens are those of transformers.

Each keeps something else: latents, index keys, windows that slide or are chunks, states of four kinds. Bytes go by the
plans of the transfer engine, so what lands is what a real transport lands.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from family_adapters import MergedAdapter, merged_adapter
from ranked_model import RankedModel, Shape, has_parts, parts_from, write

from diptych.architectures.recurrent import DeltaNet, StatePart
from diptych.architectures.registry import placement_of
from diptych.checkpoints.source import ModelSource, keeping_all, open_model
from diptych.common.members.terms import Terms, mismatch
from diptych.decode.imports import Imports
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.lora.registry import InvalidAdapter
from diptych.engine.options.config import EngineOptions
from diptych.engine.runner.states import Units
from diptych.engine.scheduler.terms import worker_terms
from diptych.engine.values.kv_regions import pages_per_state, window_pages
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer import plan
from diptych.kvtransfer.layout import PoolLayout
from diptych.kvtransfer.plan import Copies
from diptych.kvtransfer.state_plan import StateRun, state_runs

NUM_TOKENS, STEP_TOKENS, NEVER = 200, 24, 1 << 30
CASES: Final = {  # family: how pages lie at prefill and at decode
    "gpt oss": (Shape(4), Shape(8, tp=2)),
    "gemma3, groups of windows of which the last is not full": (Shape(8, tp=2), Shape(4)),
    "llama 4": (Shape(4, tp=2), Shape(16)),
    "deepseek v3": (Shape(4), Shape(8, tp=2)),
    "glm4 moe lite": (Shape(8), Shape(4, tp=2)),
    "deepseek v3.2": (Shape(8, tp=2), Shape(4)),
    "glm moe dsa, layers that share a choice": (Shape(4), Shape(16)),
    "qwen3 next": (Shape(4), Shape(8, tp=2)),
    "qwen3.5 moe": (Shape(8, tp=2), Shape(4)),
    "kimi linear": (Shape(16, tp=2), Shape(4)),
    "nemotron h": (Shape(4, tp=2), Shape(8, tp=4)),
    "lfm2": (Shape(8, tp=4), Shape(4, tp=2)),
    "minimax m2": (Shape(4), Shape(8, tp=2)),
}
UNEVEN: Final = {"llama, six KV heads": (Shape(8, tp=2), Shape(8, tp=3))}  # only a middle rank has two senders
ATTENTION, NETWORK = r"self_attn\.[qkvo]_proj", r"mlp\.(gate|up|down)_proj"
LATENTS = (
    rf"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)|{NETWORK}|mlp\.shared_experts\.(gate|up|down)_proj"
)
GATED = r"self_attn\.[kvo]_proj|mlp\.shared_expert\.(gate|up|down)_proj"
KIMI = rf"1\.self_attn\.(q_proj|kv_a_proj_with_mqa|o_proj)|{NETWORK}|block_sparse_moe\.shared_experts\.\w+_proj"
ADAPTED: Final = {  # what an adapter may change, in all layers, and what it may not
    "gpt oss": (ATTENTION, "mlp.router"),
    "gemma3, groups of windows of which the last is not full": (f"{ATTENTION}|{NETWORK}", "self_attn.q_norm"),
    "llama 4": (rf"{ATTENTION}|feed_forward\.shared_expert\.\w+_proj", "feed_forward.router"),
    "deepseek v3": (LATENTS, "self_attn.kv_b_proj"),
    "glm4 moe lite": (LATENTS, "self_attn.kv_b_proj"),
    "deepseek v3.2": (LATENTS, "self_attn.indexer.wq_b"),
    "glm moe dsa, layers that share a choice": (LATENTS, "self_attn.indexer.weights_proj"),
    "qwen3 next": (GATED, "linear_attn.out_proj"),
    "qwen3.5 moe": (GATED, "linear_attn.in_proj_qkv"),
    "kimi linear": (KIMI, "self_attn.k_proj"),
    "nemotron h": (r"mixer\.([qkvo]_proj|(shared_experts\.)?(up|down)_proj)", "mixer.in_proj"),
    "lfm2": (r"self_attn\.(q|k|v|out)_proj|feed_forward\.w[123]", "conv.in_proj"),
    "minimax m2": (ATTENTION, "block_sparse_moe.gate"),
}
STAGED: Final = {
    "llama": (Shape(4, pp=2), Shape(8)),
    "mixtral": (Shape(4, tp=2, pp=2), Shape(8)),
    "deepseek v3, yarn with mscale": (Shape(8, pp=2), Shape(4, tp=2)),
    "deepseek v3.2": (Shape(8, pp=3), Shape(4, tp=2, pp=2)),
    "glm moe dsa, layers that share a choice": (Shape(4, pp=2), Shape(16, tp=2)),
    "gemma4, groups of layers with heads of two widths": (Shape(4, pp=2), Shape(8, tp=2)),
    "qwen3 moe": (Shape(4, tp=2, pp=2), Shape(4, tp=2, pp=4)),
    "qwen3.5 moe, seven layers": (Shape(4, pp=3), Shape(8, tp=2)),
    "kimi linear, seven layers": (Shape(8, pp=2, tp=2), Shape(4)),
    "nemotron h, ten layers": (Shape(4, pp=3), Shape(8, pp=2, tp=2)),
    "lfm2, seven layers": (Shape(4, pp=2), Shape(4, pp=3)),
    "gpt oss, six layers": (Shape(4, pp=3), Shape(8, pp=2, tp=2)),
    "olmo3, eight layers": (Shape(8, tp=2), Shape(4, pp=2)),
}
IN_STAGES: Final = ", in stages"  # behind the name of a model whose layers are spread over several ranks
HANDED: Final = CASES | UNEVEN | {f"{name}{IN_STAGES}": shapes for name, shapes in STAGED.items()}
LIKE_OTHERS: Final = ("glm4 moe lite", "minimax m2", "qwen3.5 moe")  # in what is handed over
STAGED_WITH_ADAPTERS: Final = {
    "kimi linear, seven layers": (Shape(8, pp=2, tp=2), Shape(4, pp=3)),
    "nemotron h, ten layers": (Shape(4, pp=3), Shape(8, tp=2)),
}
OF_ADAPTERS: Final = ("gpt oss", "llama 4", "deepseek v3", "qwen3 next")
IS_DEEP: Final = bool(os.environ.get("DIPTYCH_DEEP_CHECKS"))


def of(cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Have a test run with these families."""
    values = [(name.removesuffix(IN_STAGES), shapes) for name, shapes in cases.items()]
    return pytest.mark.parametrize(("family_model", "shapes"), values, indirect=["family_model"], ids=cases)


BASE = -1  # in place of the slot of an adapter
Pair = Any  # the fixture's class: test helpers can't be imported
NewPair = Callable[..., Pair]
WriteAdapter = Callable[..., Any]
Asking = list[tuple[int, list[int]]]  # slots and prompts


@pytest.fixture
def new_pair(family_model: Any, make_pair: Any) -> NewPair:
    """`new_pair(shapes)`: a pair of workers whose pools lie so. `models` in place of new ones, with what they hold."""
    source = open_model(str(family_model.folder))
    source = keeping_all(source) if source.config.wide else source  # as stages have layers of two widths

    class UnlikePair(make_pair):  # type: ignore[misc]  # a fixture has no type
        num_bytes = 0  # that have landed

        def _copy(self, side: Any, other: Any, pages: Any) -> None:
            self.num_bytes += write(side.runner.ranked, other.runner.ranked, pages)

        def _unpack(self, side: Any, pages: Any) -> None:
            found = parts_from(self.prefill.runner.ranked, side.runner.ranked)
            for rank, regions in enumerate(found):
                for parts in regions:
                    for page in pages.tolist():
                        parts.unpack(side.kv[page, rank])

    def new(shapes: tuple[Shape, Shape], models: tuple[RankedModel, ...] = (), max_loras: int = 0) -> Pair:
        sides = models or tuple(RankedModel(source, each, num_pages(source, each), max_loras) for each in shapes)
        pair = UnlikePair(
            model=tuple(lambda num_pages, page_size, side=side: (side.kv, Ranked(side)) for side in sides),
            page_sizes=tuple(side.shape.page_size for side in sides),
            prefill_pages=sides[0].num_pages,
            decode_pages=sides[1].num_pages,
            pages_per_state=tuple(per_state(source, side) for side in sides),
            windows=window_pages(source.config, STEP_TOKENS),
            max_step_tokens=STEP_TOKENS,
            check_every=NEVER,
            in_parts=has_parts(sides[0], sides[1]),
        )
        pair.in_parts = False  # the parts are real
        return pair

    return new


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    """The name of the family of which the test is."""
    return str(request.node.callspec.id)


@pytest.fixture
def adapters(family_model: Any, family: str, write_adapter: WriteAdapter, tmp_path: Path) -> list[MergedAdapter]:
    """Two of unlike ranks, by their slots."""
    folder, modules = family_model.folder, ADAPTED[family.partition(", seven")[0].partition(", ten")[0]][0]
    return [
        merged_adapter(folder, tmp_path / str(slot), modules, write_adapter, rank=rank, seed=slot)
        for slot, rank in enumerate((4, 9))
    ]


class Ranked:
    """A runner that says whose it is."""

    def __init__(self, ranked: RankedModel) -> None:
        self.ranked = ranked
        self.execute = ranked.execute


def per_state(source: ModelSource, model: RankedModel) -> int:
    (found,) = {pages_per_state(source.config, model.shape.tp, "float32", each) for each in model.layouts}
    return found


def num_pages(source: ModelSource, shape: Shape) -> int:
    """Return enough for a few requests, and no more."""
    beside = 40 if source.config.recurrent else 0
    return (
        3 * window_pages(source.config, STEP_TOKENS).pool_pages(NUM_TOKENS // shape.page_size, shape.page_size) + beside
    )


def asked(family_model: Any) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield rooms, prompts and outputs: some in pages of no side, one longer than a window and than two steps."""
    for room, index in enumerate((1, 4, 6), 1):
        yield room, family_model.prompts[index], family_model.outputs[index]


@of({name: case for name, case in HANDED.items() if IS_DEEP or name not in LIKE_OTHERS})
def test_tokens_are_those_of_transformers_and_what_is_sent_is_what_is_live(
    family_model: Any, new_pair: NewPair, shapes: tuple[Shape, Shape], squeeze: Any
) -> None:
    """Also as choices of one prompt, after a retraction, and when both have changed roles, with pools as they are."""
    pair = new_pair(shapes)
    for room, prompt, output in asked(family_model):
        pair.start(room, prompt, max_tokens=len(output))
    pair.run()
    decode = pair.decode.runner.ranked
    live = 0
    for room, prompt, output in asked(family_model):
        assert pair.tokens(room) == output
        live += num_live(pair, prompt)
    assert pair.num_written == live
    assert pair.num_bytes == live * sum(layout.page_nbytes for layout in decode.layouts)
    pair.assert_clean()
    assert_choices_are_what_each_is_alone(pair, family_model)
    assert_retracted_ones_say_the_same(pair, family_model, squeeze)
    swapped = new_pair(shapes, models=(decode, pair.prefill.runner.ranked))
    for room, prompt, output in asked(family_model):
        swapped.start(room, prompt, max_tokens=len(output))
    swapped.run()
    assert [swapped.tokens(room) for room, *_ in asked(family_model)] == [each for *_, each in asked(family_model)]
    swapped.assert_clean()


@of({name: case for name, case in CASES.items() if IS_DEEP or name in OF_ADAPTERS} | STAGED_WITH_ADAPTERS)
def test_with_adapters_tokens_are_those_of_merged_weights(
    family_model: Any, new_pair: NewPair, shapes: tuple[Shape, Shape], adapters: list[MergedAdapter], squeeze: Any
) -> None:
    """Beside the base model, from what each has cached, in mid-stream, and after a retraction.

    All have the same two prompts: who found what is cached for another one would go on otherwise.
    """
    pair = new_pair(shapes, max_loras=len(adapters))
    for side, (slot, adapter) in product((pair.prefill, pair.decode), enumerate(adapters)):
        side.runner.ranked.install(slot, adapter.folder)
    asking = [(slot, family_model.prompts[index]) for slot, index in product((BASE, 0, 1), (4, 6))]
    cold = answers(pair, 1, asking, 6)
    assert cold[:2] == [family_model.outputs[4], family_model.outputs[6]]
    assert all(adapters[slot].continues(*text) for slot, *text in adapted(asking, cold))
    assert len({*map(tuple, cold[1::2])}) == len(asking[1::2])
    assert pair.num_written == sum(num_live(pair, prompt) for _, prompt in asking)
    assert answers(pair, 100, asking, 6) == cold
    assert pair.num_written < 2 * sum(num_live(pair, prompt) for _, prompt in asking)
    on = [(slot, [*prompt, *output[:2]]) for (slot, prompt), output in zip(asking, cold, strict=True)]
    assert answers(pair, 200, on, 4, num_prior_output_tokens=2) == [output[2:] for output in cold]
    others = squeeze(pair.decode.cache)
    long = answers(pair, 300, asking[1::2], 24, lambda: run_squeezed(pair, others))
    assert all(adapters[slot].continues(*text) for slot, *text in adapted(asking[1::2], long))
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


def answers(
    pair: Pair, first_room: int, asking: Asking, max_tokens: int, run: Callable[[], None] | None = None, **fields: Any
) -> list[list[int]]:
    """Return what is said behind the prompts of adapters, each in a namespace of its own; `run` plays it."""
    rooms = range(first_room, first_room + len(asking))
    for room, (slot, prompt) in zip(rooms, asking, strict=True):
        key = b"" if slot == BASE else b"adapter %d" % slot
        pair.start(room, prompt, max_tokens, extra_key=key, adapter=slot, **fields)
    (run or pair.run)()
    return [pair.tokens(room) for room in rooms]


def adapted(asking: Asking, outputs: list[list[int]]) -> list[tuple[int, list[int], list[int]]]:
    return [(*each, output) for each, output in zip(asking, outputs, strict=True) if each[0] != BASE]


def num_live(pair: Pair, prompt: list[int]) -> int:
    """Return the pages that decode needs behind a prompt."""
    size, cache = pair.decode.runner.ranked.shape.page_size, pair.decode.cache
    return int(-(-len(prompt) // size) + cache.windows.num_live(len(prompt), size) + cache.pages_per_state)


@of(CASES)
def test_what_has_no_adapter_is_refused_by_name(
    family_model: Any, shapes: tuple[Shape, Shape], family: str, write_adapter: WriteAdapter, tmp_path: Path
) -> None:
    """The choice of experts, what makes keys out of latents, indexers, and all that is multiplied around a state."""
    source, module = open_model(str(family_model.folder)), ADAPTED[family][1]
    name = next(name for name, _ in placement_of(source.config) if name.endswith(f".{module}.weight"))
    name = name.removesuffix(".weight")
    write_adapter(tmp_path / "a", {name: (8, 8)})
    with pytest.raises(InvalidAdapter, match=f"{name}' can't have an adapter"):
        read_adapter(tmp_path / "a", placement_of(source.config))


@pytest.mark.parametrize("family_model", ["qwen3 next"], indirect=True)
def test_queries_among_gates_have_no_adapter(family_model: Any, write_adapter: WriteAdapter, tmp_path: Path) -> None:
    """A checkpoint has rows of both in turns, of each head; the model keeps them apart."""
    source = open_model(str(family_model.folder))
    name = next(name for name, _ in placement_of(source.config) if name.endswith(".q_proj.weight"))
    rows = 2 * source.config.num_heads * source.config.head_dim
    write_adapter(tmp_path / "a", {name.removesuffix(".weight"): (rows, source.config.hidden_size)})
    with pytest.raises(
        InvalidAdapter, match=rf"lora_B of '.*q_proj' is \({rows}, 4\); model .* say \({rows // 2}, 4\)"
    ):
        read_adapter(tmp_path / "a", placement_of(source.config))


def assert_choices_are_what_each_is_alone(pair: Pair, family_model: Any) -> None:
    prompt = family_model.prompts[5]
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True) for seed in (3, 4, 5)]
    for room, each in enumerate(params, 100):
        pair.start_with(each, room, prompt)
    pair.run()
    for room, each in enumerate(params, 200):
        pair.start_with(each, room, prompt)
        pair.run()
        assert pair.tokens(room) == pair.tokens(room - 100)
    assert len({tuple(pair.tokens(room)) for room in (200, 201, 202)}) > 1
    pair.assert_clean()


def assert_retracted_ones_say_the_same(pair: Pair, family_model: Any, squeeze: Any) -> None:
    """Decode begins again with what it has cached, which is never a page that was sent in part."""
    for room, prompt, _ in asked(family_model):
        pair.start(300 + room, prompt, max_tokens=30)
    pair.run()
    for room, prompt, _ in asked(family_model):
        pair.start(400 + room, prompt, max_tokens=30)
    run_squeezed(pair, squeeze(pair.decode.cache))
    for room, *_ in asked(family_model):
        assert pair.tokens(300 + room) == pair.tokens(400 + room)
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


def run_squeezed(pair: Pair, others: Any) -> None:
    """Let others take decode's memory away at random until nothing moves."""
    rng, moves = random.Random(0), (pair.deliver, pair.step)
    while any([move(side) for side in (pair.decode, pair.prefill) for move in moves]) or others.release():
        pair.expire()
        if rng.random() < 0.4:
            others.toggle()


@pytest.mark.parametrize("family_model", ["qwen3 next"], indirect=True)
def test_a_state_that_goes_by_tokens_changes_what_is_said(
    family_model: Any, new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Copies.cut
    monkeypatch.setattr(Copies, "cut", lambda self, pages: plain(self, replace(pages, as_bytes=False)))
    pair = new_pair(CASES["qwen3 next"])
    for room, prompt, output in asked(family_model):
        pair.start(room, prompt, max_tokens=len(output))
    pair.run()
    assert all(pair.tokens(room)[1:] != output[1:] for room, _, output in asked(family_model))


def rank_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "state_runs", lambda src, dst: () if src.rank == 1 else state_runs(src, dst))


def ranks_swapped(patch: pytest.MonkeyPatch) -> None:
    """Each of two source ranks writes where the other one's share belongs."""

    def swapped(src: PoolLayout, dst: PoolLayout) -> tuple[StateRun, ...]:
        return state_runs(replace(src, rank=1 - src.rank), dst)

    patch.setattr(plan, "state_runs", swapped)


def shifted_by_a_head(patch: pytest.MonkeyPatch) -> None:
    """What is sent begins a head late."""

    def late(run: StateRun, src: PoolLayout) -> StateRun:
        assert run.copy.pack is not None
        return replace(run, first_row=run.first_row + src.state_nbytes // NUM_UNITS // run.copy.pack.row_nbytes)

    patch.setattr(plan, "state_runs", lambda src, dst: tuple(late(run, src) for run in state_runs(src, dst)))


def stale(patch: pytest.MonkeyPatch) -> None:
    """The state of the first prompt is sent with all others."""
    plain, first = StateRun.cut, []

    def cut(self: StateRun, src: Any, dst: Any) -> Any:
        first.append(src)
        return plain(self, first[0], dst)

    patch.setattr(StateRun, "cut", cut)


def put_together_with_the_text(patch: pytest.MonkeyPatch) -> None:
    """Decode takes the pages of a state for parts of heads."""
    plain = Imports._assemble

    def assemble(self: Any, room: Any, now_s: float) -> None:
        num_pages, self._cache.pages_per_state = self._cache.pages_per_state, 0
        plain(self, room, now_s)
        self._cache.pages_per_state = num_pages

    patch.setattr(Imports, "_assemble", assemble)


def by_layers(patch: pytest.MonkeyPatch) -> None:
    """States lie in pages as they do in slots."""

    def put(self: Any, slots: Any, states: Any) -> None:
        plain = self._places[0][0]._base
        plain[slots] = states.view(plain.dtype)[:, : plain.shape[1]]

    def take(self: Any, slots: Any, nbytes: int) -> Any:
        states, plain = torch.zeros(len(slots), nbytes, dtype=torch.uint8), self._places[0][0]._base
        states.view(plain.dtype)[:, : plain.shape[1]] = plain[slots]
        return states

    patch.setattr(Units, "put", put)
    patch.setattr(Units, "take", take)


def queries_keys_and_values_cut_as_one(patch: pytest.MonkeyPatch) -> None:
    plain = DeltaNet.state_parts.fget  # type: ignore[attr-defined]

    def parts(self: DeltaNet) -> tuple[StatePart, ...]:
        conv, kept = plain(self)
        return conv._replace(sections=(self.num_channels,)), kept

    patch.setattr(DeltaNet, "state_parts", property(parts))


NUM_UNITS: Final = 2  # of the tiny delta nets
STATE_MUTANTS: Final = (
    rank_dropped,
    ranks_swapped,
    shifted_by_a_head,
    stale,
    put_together_with_the_text,
    by_layers,
    queries_keys_and_values_cut_as_one,
)


@pytest.mark.parametrize("family_model", ["qwen3.5 moe"], indirect=True)
def test_what_goes_wrong_between_unlike_ranks_changes_what_is_said(
    family_model: Any, new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> list[list[int]]:
        pair = new_pair((Shape(8, tp=2), Shape(4)))
        for room, prompt, output in asked(family_model):
            pair.start(room, prompt, max_tokens=len(output))
            pair.run()
        return [pair.tokens(room)[1:] for room, *_ in asked(family_model)]

    right = [output[1:] for *_, output in asked(family_model)]
    assert said() == right
    for mutant in STATE_MUTANTS:
        with monkeypatch.context() as patch:
            mutant(patch)
            tokens = said()
        same = [found == wanted for found, wanted in zip(tokens, right, strict=True)]
        assert same == [mutant is stale, False, False], mutant.__name__


def stage_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        plan, "state_runs", lambda src, dst: () if dst.state_stage is None and _first(src) else state_runs(src, dst)
    )


def first_layers_in_place_of_all(patch: pytest.MonkeyPatch) -> None:
    """Each stage writes as if its layers were the first."""

    def shifted(src: PoolLayout, dst: PoolLayout) -> tuple[StateRun, ...]:
        own = src.state_stage and replace(src.state_stage, first_layer=0)
        return state_runs(replace(src, state_stage=own), dst)

    patch.setattr(plan, "state_runs", shifted)


def stages_by_units(patch: pytest.MonkeyPatch) -> None:
    """What a stage has is taken for a run of the whole."""

    def run(src: PoolLayout, dst: PoolLayout) -> tuple[StateRun, ...]:
        found = state_runs(src, dst)
        return tuple(replace(each, first_row=i * each.num_dst) for i, each in enumerate(found))

    patch.setattr(plan, "state_runs", run)


def _first(layout: PoolLayout) -> int:
    return layout.state_stage.first_layer if layout.state_stage else 0


@pytest.mark.parametrize("family_model", ["qwen3.5 moe, seven layers"], indirect=True)
def test_what_goes_wrong_between_stages_changes_what_is_said(
    family_model: Any, new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mutant in (stage_dropped, first_layers_in_place_of_all, stages_by_units):
        with monkeypatch.context() as patch:
            mutant(patch)
            pair = new_pair((Shape(8, pp=3), Shape(4)))
            for room, prompt, output in asked(family_model):
                pair.start(room, prompt, max_tokens=len(output))
            pair.run()
        same = [pair.tokens(room)[1:] == output[1:] for room, _, output in asked(family_model)]
        assert not any(same), mutant.__name__


@pytest.mark.parametrize(
    ("family_model", "one", "other", "words"),
    [
        (
            "gemma4, groups of layers with heads of two widths",
            Shape(4),
            Shape(8),
            "of 4 tokens on 1 rank and of .* of 8",
        ),
        ("gemma4, groups of layers with heads of two widths", Shape(4), Shape(4, tp=2), "on 1 rank and of .* on 2"),
    ],
    indirect=["family_model"],
)
def test_what_cannot_be_rearranged_is_refused_in_words(family_model: Any, one: Shape, other: Shape, words: str) -> None:
    """Groups of two widths take turns in the same bytes."""
    source = open_model(str(family_model.folder))

    def terms(shape: Shape) -> Terms:
        layout = RankedModel(source, shape, 2).layouts[0]
        return worker_terms(source, "ucx", layout, TransferRules(), EngineOptions(tp=shape.tp, dtype="float32"), "")

    assert mismatch(terms(one), terms(one)) == ""
    assert re.search(words, mismatch(terms(one), terms(other)))
