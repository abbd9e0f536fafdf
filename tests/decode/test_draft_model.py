"""A model that guesses for another one: the same tokens, scores and ends, whatever a request asks and happens to it.

A model that guesses for itself is always right about greedy requests, as long as what it keeps of every token is that
token's: wherever pages came from.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_models import AskAlways, InOneThread, runner_with_draft, with_draft
from draft_scenes import FEW_PAGES, NUM_PAGES, ROOMS, NewEngine, Serving, TwoRanks
from every_kind import KINDS, Answer
from odd_store import OddStore
from stepped_engine import PAGE, Engine
from tier_scenes import MIB, TERMS

from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.lora.peft_folder import read_adapter
from diptych.engine.runner.draft_model import CpuDraftModel
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.tiers.file_tier import FileTier
from diptych.engine.tiers.lasting_tier import LastingTier
from diptych.engine.tiers.page_files import PageFiles
from diptych.engine.tiers.page_format import PageFormat
from diptych.engine.tiers.page_objects import Objects, PageObjects
from diptych.engine.tiers.segments import SegmentFormat
from diptych.engine.tiers.shared_tier import SharedTier
from diptych.engine.values.batch import DraftBatch, ForwardBatch, ForwardMode, OnLayer
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer

EVERY_KIND = range(1, 2 * len(KINDS) + 1)  # greedy, and seeded
SQUEEZED = {"num_pages": FEW_PAGES, "rooms": ROOMS}
AWAY = {**SQUEEZED, "num_slots": 64}  # evicted pages come back from host memory


def greedy(room: int) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def smaller(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Another random model, of one layer, of the same words."""
    import transformers

    folder = tmp_path_factory.mktemp("models") / "smaller"
    config = transformers.LlamaConfig.from_pretrained(tiny_folder)
    config.num_hidden_layers, config.num_key_value_heads, config.layer_types = 1, 4, None
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    return open_model(str(folder))


class Pair:
    """Serves requests by a model alone, and beside one that guesses for it."""

    def __init__(self, new_engine: NewEngine, source: ModelSource, tokenizer: Tokenizer) -> None:
        self.alone = Serving(new_engine, source, tokenizer)
        self._new_engine = new_engine
        self._tokenizer = tokenizer
        self.drafter = AskAlways()
        self.beside = self.alone

    def guessed(self, draft: ModelSource, seldom: int = 0, **scene: Any) -> dict[int, Answer]:
        self.beside = Serving(self._new_engine, with_draft(self.alone.source, draft), self._tokenizer)
        self.drafter = AskAlways(seldom)

        def opened(source: ModelSource, kv: torch.Tensor) -> Any:
            return runner_with_draft(source, draft, kv)

        scene = {"open_runner": opened, "rooms": EVERY_KIND, **scene}
        return self.beside.answers({}, drafter=self.drafter, **scene)


@pytest.fixture
def pair(new_engine: NewEngine, tiny_folder: Path, byte_tokenizer: Tokenizer) -> Pair:
    return Pair(new_engine, open_model(str(tiny_folder)), byte_tokenizer)


@pytest.mark.parametrize("scene", [{}, {"overlap": True}, AWAY], ids=["alone", "overlapped", "retracted"])
def test_no_answer_is_another_one(pair: Pair, smaller: ModelSource, scene: dict[str, Any]) -> None:
    rooms = scene.get("rooms", EVERY_KIND)
    assert pair.guessed(smaller, **scene) == pair.alone.answers({}, rooms=rooms)
    assert pair.drafter.compared > 4 * len(rooms)
    assert pair.drafter.came < pair.drafter.compared
    assert (pair.drafter.num_early > 0) == bool(scene.get("overlap"))
    assert (pair.beside.num_retractions > 3) == (pair.beside.num_restored > 3) == (scene is AWAY)


def test_adapters_change_what_it_guesses_for(
    pair: Pair, smaller: ModelSource, tmp_path: Path, write_adapter: Callable[..., Any]
) -> None:
    """Two adapters and the model itself share steps, and the draft model has none: it guesses worse for them."""
    shapes = {f"model.layers.{layer}.self_attn.{name}_proj": (64, 64) for layer in (0, 1) for name in ("q", "o")}
    for slot in (0, 1):
        write_adapter(tmp_path / str(slot), shapes, seed=slot)

    def install(runner: ModelRunner) -> None:
        for slot in (0, 1):
            adapter = read_adapter(tmp_path / str(slot), FAMILIES["llama"].placement(pair.alone.source.config))
            runner.loras.install(slot, runner.loras.prepare(adapter))

    def fields(room: int) -> dict[str, Any]:
        return {"adapter": room % 3 - 1, "extra_key": bytes([room % 3])}

    scene: dict[str, Any] = {"prepare": install, "fields": fields}
    guessed = pair.guessed(smaller, overlap=True, **scene)
    assert guessed == pair.alone.answers({}, rooms=EVERY_KIND, **scene) != pair.alone.answers({}, rooms=EVERY_KIND)
    pair.guessed(pair.alone.source, params_of=greedy, **scene)  # itself, without the adapters
    assert 0 < pair.drafter.came < pair.drafter.compared


def test_no_answer_is_another_one_where_it_goes_on_elsewhere(pair: Pair, smaller: ModelSource) -> None:
    whole = pair.alone.answers({}, rooms=EVERY_KIND)
    said = {room: answer.token_ids[: 1 + room % 8] for room, answer in whole.items()}
    said = {room: tokens for room, tokens in said.items() if len(tokens) < len(whole[room].token_ids)}
    rest = pair.guessed(smaller, said=said)
    assert {room: (*tokens, *rest[room].token_ids) for room, tokens in said.items()} == {
        room: whole[room].token_ids for room in said
    }


@pytest.mark.parametrize("perfect", [False, True])
def test_two_ranks(pair: Pair, smaller: ModelSource, perfect: bool) -> None:
    """The other rank hears of what is guessed, and of each step, by the log."""
    draft = pair.alone.source if perfect else smaller
    scene: dict[str, Any] = {"params_of": greedy} if perfect else {}
    with ExitStack() as stack:

        def of(draft: ModelSource | None) -> Callable[[ModelSource, torch.Tensor], TwoRanks]:
            return lambda source, kv: stack.enter_context(closing(TwoRanks(source, kv, draft)))

        guessed = pair.guessed(draft, open_runner=of(draft), **scene)
        assert guessed == pair.alone.answers({}, open_runner=of(None), rooms=EVERY_KIND, **scene)
    assert (pair.drafter.came == pair.drafter.compared) == perfect


@pytest.mark.parametrize("scene", [{}, {"overlap": True}, AWAY], ids=["alone", "overlapped", "retracted"])
def test_a_model_is_always_right_about_itself(pair: Pair, scene: dict[str, Any]) -> None:
    pair.guessed(pair.alone.source, params_of=greedy, **scene)
    assert pair.drafter.came == pair.drafter.compared > 100


def forgets_prompts(batch: ForwardBatch) -> bool:
    return bool((batch.extend_lens > np.maximum(batch.num_sampled, 1)).any())


def forgets_what_is_said(batch: ForwardBatch) -> bool:
    return batch.mode is ForwardMode.DECODE


@pytest.mark.parametrize("forgets", [forgets_prompts, forgets_what_is_said])
def test_what_it_does_not_keep_makes_it_guess_wrong_and_changes_no_answer(
    pair: Pair, forgets: Callable[[ForwardBatch], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = CpuDraftModel.follow

    def forgetful(model: CpuDraftModel, batch: ForwardBatch, on_layer: OnLayer | None) -> None:
        if not forgets(batch):
            follow(model, batch, on_layer)

    expected = pair.alone.answers({}, params_of=greedy, rooms=EVERY_KIND)
    monkeypatch.setattr(CpuDraftModel, "follow", forgetful)
    assert pair.guessed(pair.alone.source, params_of=greedy) == expected
    assert pair.drafter.came < 0.9 * pair.drafter.compared


def long(room: int) -> SamplingParams:
    return SamplingParams(max_tokens=160 - room, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("scene", [{}, {"overlap": True}, {"num_pages": 80}], ids=["alone", "overlapped", "retracted"])
def test_a_model_that_is_asked_seldom_does_not_follow_and_catches_up(pair: Pair, scene: dict[str, Any]) -> None:
    few: dict[str, Any] = {"rooms": range(1, 5), "params_of": long}
    assert pair.guessed(pair.alone.source, seldom=20, **few, **scene) == pair.alone.answers({}, **few)
    assert pair.drafter.num_unfollowed > 40
    assert pair.drafter.came == pair.drafter.compared > 30
    assert (pair.beside.num_retractions > 0) == ("num_pages" in scene)


def test_two_ranks_catch_up(pair: Pair) -> None:
    few: dict[str, Any] = {"rooms": range(1, 5), "params_of": long}
    with ExitStack() as stack:

        def opened(source: ModelSource, kv: torch.Tensor) -> TwoRanks:
            return stack.enter_context(closing(TwoRanks(source, kv, pair.alone.source)))

        pair.guessed(pair.alone.source, seldom=20, open_runner=opened, **few)
    assert pair.drafter.num_unfollowed > 40
    assert pair.drafter.came == pair.drafter.compared > 30


def test_a_model_that_does_not_catch_up_guesses_wrong(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"rooms": range(1, 5), "params_of": long}
    monkeypatch.setattr(DraftBatch, "catching_up", lambda batch: ())
    assert pair.guessed(pair.alone.source, seldom=20, **few) == pair.alone.answers({}, **few)
    assert pair.drafter.came < pair.drafter.compared


@pytest.mark.parametrize("medium", ["files", "store"])
def test_draft_layers_come_back_from_what_outlives_a_worker(
    medium: str, new_engine: NewEngine, tiny_folder: Path, tmp_path: Path
) -> None:
    source = open_model(str(tiny_folder))
    both, objects = with_draft(source, source), OddStore()
    layout = ModelRunner.pool_layout(both.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    rooms, others, told = range(11, 19), range(21, 29), []
    for life in range(2):
        kv = torch.full(layout.shape, torch.nan)
        pages = kv.numpy().reshape(NUM_PAGES, -1).view(np.uint8)
        if medium == "files":
            record = SegmentFormat(TERMS, layout.page_nbytes)
            tier: LastingTier = FileTier(PageFiles(tmp_path, record, 64 * MIB, pages, pages))
            options: dict[str, Any] = {"tiers": lambda _, tier=tier: [tier]}
        else:
            record_of_store = PageFormat(TERMS, layout.page_nbytes)
            tier = SharedTier(PageObjects(objects, Objects(record_of_store, 2, TERMS.hex()), pages))
            options = {"store": tier}
        runner, drafter = runner_with_draft(both, source, kv), AskAlways()
        engine = new_engine(
            drafter=drafter, worker=InOneThread, runner=runner, vocab_size=321, num_pages=NUM_PAGES, **options
        )
        drafter.begin(runner.draft_model, engine.cache)
        know_the_medium(tier, is_empty=not life)
        for room in rooms if life else (*rooms, *others):  # what is used twice is kept
            engine.start_with(room, [room % 10, *range(40, 70)], greedy(room))
            run_with(engine, tier, room)
        told.append([Answer.of(engine.outputs[room]) for room in rooms])
        assert drafter.came == drafter.compared > 20
        engine.cache._evict(engine.cache.num_available)
        tier.finish_writes()
        tier.close()
    assert tier.counts.read.num_pages >= 8 * 6
    assert told[0] == told[1]


def know_the_medium(tier: LastingTier, *, is_empty: bool) -> None:
    """Wait until it is measured, if there is something."""
    while (tier.look_up_s if isinstance(tier, SharedTier) else 0.0 if is_empty else tier.load_s(1)) == math.inf:
        select.select(tier.descriptors(), [], [], 0.001)
        tier.restored()


def run_with(engine: Engine, tier: LastingTier, room: int) -> None:
    """Let an engine go on until a request has ended, with what comes from a tier."""
    engine.run()
    while not any(output.finish for output in engine.outputs[room]):
        select.select(tier.descriptors(), [], [], 0.01)
        for event in tier.restored():
            engine.core.handle(event, engine.now_s)
        engine.run()
