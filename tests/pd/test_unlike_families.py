"""Model families on pairs whose pages or ranks differ: the tokens are those of transformers.

Each keeps something else: latents, index keys, windows that slide or are chunks, states of four kinds. Bytes go by the
plans of the transfer engine, so what lands is what a real transport lands.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
from ranked_model import RankedModel, Shape, parts_from, write

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.members.terms import Terms, mismatch
from diptych.engine.options.config import EngineOptions
from diptych.engine.scheduler.terms import worker_terms
from diptych.engine.values.kv_regions import pages_per_state, window_pages
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.plan import Copies

NUM_TOKENS, STEP_TOKENS, NEVER = 200, 24, 1 << 30
CASES: Final = {  # family: how pages lie at prefill and at decode
    "gpt oss": (Shape(4), Shape(8, tp=2)),
    "gemma3, groups of windows of which the last is not full": (Shape(8, tp=2), Shape(4)),
    "llama 4": (Shape(4, tp=2), Shape(16)),
    "deepseek v3": (Shape(4), Shape(8, tp=2)),
    "glm4 moe lite": (Shape(8), Shape(4, tp=2)),
    "deepseek v3.2": (Shape(8, tp=2), Shape(4)),
    "glm moe dsa, layers that share a choice": (Shape(4), Shape(16)),
    "qwen3 next": (Shape(4), Shape(8)),
    "qwen3.5 moe": (Shape(8, tp=2), Shape(4, tp=2)),
    "kimi linear": (Shape(16), Shape(4)),
    "nemotron h": (Shape(4, tp=2), Shape(8, tp=2)),
    "lfm2": (Shape(8), Shape(4)),
    "minimax m2": (Shape(4), Shape(8, tp=2)),
}
families = pytest.mark.parametrize(("family_model", "shapes"), CASES.items(), indirect=["family_model"], ids=CASES)
Pair = Any  # the fixture's class: test helpers can't be imported
NewPair = Callable[..., Pair]


@pytest.fixture
def new_pair(family_model: Any, make_pair: Any) -> NewPair:
    """`new_pair(shapes)`: a pair of workers whose pools lie so. `models` in place of new ones, with what they hold."""
    source = open_model(str(family_model.folder))

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

    def new(shapes: tuple[Shape, Shape], models: tuple[RankedModel, ...] = ()) -> Pair:
        sides = models or tuple(RankedModel(source, shape, num_pages(source, shape)) for shape in shapes)
        pair = UnlikePair(
            model=tuple(lambda num_pages, page_size, side=side: (side.kv, Ranked(side)) for side in sides),
            page_sizes=tuple(side.shape.page_size for side in sides),
            prefill_pages=sides[0].num_pages,
            decode_pages=sides[1].num_pages,
            pages_per_state=tuple(per_state(source, side) for side in sides),
            windows=window_pages(source.config, STEP_TOKENS),
            max_step_tokens=STEP_TOKENS,
            check_every=NEVER,
            in_parts=any(parts_from(sides[0], sides[1])),
        )
        pair.in_parts = False  # the parts are real
        return pair

    return new


class Ranked:
    """A runner that says whose it is."""

    def __init__(self, ranked: RankedModel) -> None:
        self.ranked = ranked
        self.execute = ranked.execute


def per_state(source: ModelSource, model: RankedModel) -> int:
    return pages_per_state(source.config, model.shape.tp, "float32", model.layouts[0])


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


@families
def test_tokens_are_those_of_transformers_and_what_is_sent_is_what_is_live(
    family_model: Any, new_pair: NewPair, shapes: tuple[Shape, Shape], squeeze: Any
) -> None:
    """Also as choices of one prompt, after a retraction, and when both have changed roles, with pools as they are."""
    pair = new_pair(shapes)
    for room, prompt, output in asked(family_model):
        pair.start(room, prompt, max_tokens=len(output))
    pair.run()
    decode, cache = pair.decode.runner.ranked, pair.decode.cache
    live = 0
    for room, prompt, output in asked(family_model):
        assert pair.tokens(room) == output
        size = decode.shape.page_size
        live += -(-len(prompt) // size) + cache.windows.num_live(len(prompt), size) + cache.pages_per_state
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
    others, rng = squeeze(pair.decode.cache), random.Random(0)
    moves = pair.deliver, pair.step
    while any([move(side) for side in (pair.decode, pair.prefill) for move in moves]) or others.release():
        pair.expire()
        if rng.random() < 0.4:
            others.toggle()
    for room, *_ in asked(family_model):
        assert pair.tokens(300 + room) == pair.tokens(400 + room)
    assert pair.decode.core.report().counts.retractions > 0
    pair.assert_clean()


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


@pytest.mark.parametrize(
    ("family_model", "one", "other", "words"),
    [
        ("qwen3 next", Shape(4), Shape(4, tp=2), "on 1 rank and of .* on 2 ranks"),
        ("nemotron h", Shape(4), Shape(4, tp=2), "on 1 rank and of .* on 2 ranks"),
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
    """A state is cut by other heads in each of its parts; groups of two widths take turns in the same bytes."""
    source = open_model(str(family_model.folder))

    def terms(shape: Shape) -> Terms:
        layout = RankedModel(source, shape, 2).layouts[0]
        return worker_terms(source, "ucx", layout, TransferRules(), EngineOptions(tp=shape.tp, dtype="float32"), "")

    assert mismatch(terms(one), terms(one)) == ""
    assert re.search(words, mismatch(terms(one), terms(other)))
