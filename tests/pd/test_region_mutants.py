"""Bugs planted in one region of pages: on their way they are refused, or else they change tokens; so in a cache.

A latent is key and value of all heads, so a page of them has no second copy of anything that could hide a mistake.
Index keys lie behind the latents and are read by nobody but the indexer: where they are wrong, attention is as good as
ever, to the wrong tokens. Latents may be lent to later layers, some of which have index keys. Layers with a window and
those without have a region each, and some of both lend their keys; or their groups take turns in pages of one region.
What a new region needs is a model and rows in `MUTANTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers

from diptych.checkpoints.source import ModelSource, keeping_all, open_model
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.kv_regions import window_pages
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.output import FailureCode
from diptych.kvtransfer.layout import PoolLayout

PAGE_SIZE, NUM_PAGES, NUM_TOKENS, NUM_LAYERS, LATENT_DIM, INDEX_DIM = 4, 64, 12, 2, 48, 24
PROMPT = [(7 * i) % 96 for i in range(23)]
LATENTS: Final = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "first_k_dense_replace": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": LATENT_DIM - 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
PLACES_MATTER: Final = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
KINDS: Final = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": PLACES_MATTER,  # the usual rotation leaves most of a head, and hardly turns the rest
    },
    "tie_word_embeddings": False,  # tied ones say the last token again, whatever is attended to
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
BORROWERS: Final = {key: value for key, value in LATENTS.items() if key != "q_lora_rank"} | {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "kv_source_layers": [0, 1, 0, 1],
    "no_rope_layers": [1, 0, 1, 0],
    "index_n_heads": 8,
    "index_head_dim": INDEX_DIM,
    "index_topk": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
IN_GROUPS: Final = KINDS | {
    "sliding_window": 8,
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "global_head_dim": 64,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any], int]]] = {  # by what is damaged: which region of a page
    "latents": ("DeepseekV3", LATENTS, 0),
    "index keys": ("DeepseekV32", LATENTS | {"index_n_heads": 8, "index_head_dim": INDEX_DIM, "index_topk": 4}, 1),
    "lent latents": ("MistralLarge4", BORROWERS, 0),
    "index keys of those that borrow": ("MistralLarge4", BORROWERS, 1),
    "windows": ("Gemma4", KINDS, 0),
    "wide heads": ("Gemma4", KINDS, 1),
    "pages of wide heads": ("Gemma4", IN_GROUPS, 0),
    "pages of windows": ("Gemma4", IN_GROUPS, 1),
    "pages of the last windows, which are lent": ("Gemma4", IN_GROUPS, 2),
}
KEEPING: Final = ("windows", "wide heads")
GROUPS: Final = {"pages of wide heads": 0, "pages of windows": 1, "pages of the last windows, which are lent": 2}
Cells = np.ndarray[Any, Any]  # [num_pages, num_layers, num_planes, PAGE_SIZE, heads and dimensions]: of some pages
Mutant = Callable[[Cells, Cells], Cells]


def first_page_dropped(before: Cells, arrived: Cells) -> Cells:
    """The first page keeps what it had."""
    return np.concatenate([before[:1], arrived[1:]])


def three_pages_dropped(before: Cells, arrived: Cells) -> Cells:
    return np.concatenate([before[:3], arrived[3:]])


def first_page_zeroed(before: Cells, arrived: Cells) -> Cells:
    return np.concatenate([np.zeros_like(arrived[:1]), arrived[1:]])


def zeroed(before: Cells, arrived: Cells) -> Cells:
    return np.zeros_like(arrived)


def shifted(before: Cells, arrived: Cells) -> Cells:
    """Every token lies where the next one should, and the last one of a page is lost."""
    return np.concatenate([before[..., :1, :], arrived[..., :-1, :]], axis=3)


def in_another_order_of_layers(before: Cells, arrived: Cells) -> Cells:
    return arrived[:, ::-1]


def in_another_order_of_pages(before: Cells, arrived: Cells) -> Cells:
    return arrived[::-1]


def with_the_rotated_part_in_front(before: Cells, arrived: Cells) -> Cells:
    return np.roll(arrived, 16, axis=4)


def every_second_page_dropped(before: Cells, arrived: Cells) -> Cells:
    changed = arrived.copy()
    changed[::2] = before[::2]
    return changed


def with_the_layer_before_in_place_of_the_last(before: Cells, arrived: Cells) -> Cells:
    """The last one is that which lends its keys and values."""
    return np.concatenate([arrived[:, :-1], arrived[:, -2:-1]], axis=1)


def oldest_seen_page_dropped(before: Cells, arrived: Cells) -> Cells:
    """The one before it is there for whoever goes on behind the last whole page."""
    return np.concatenate([arrived[:1], before[1:2], arrived[2:]])


def oldest_seen_page_zeroed(before: Cells, arrived: Cells) -> Cells:
    return oldest_seen_page_dropped(np.zeros_like(before), arrived)


def without_the_newest_page(before: Cells, arrived: Cells) -> Cells:
    return np.concatenate([arrived[:-1], before[-1:]])


def with_values_in_place_of_keys(before: Cells, arrived: Cells) -> Cells:
    """In one of the regions both are made of the same numbers."""
    return arrived[:, :, ::-1]


def with_keys_as_values(before: Cells, arrived: Cells) -> Cells:
    return arrived[:, :, [0, 0]]


OF_KINDS: Final = (
    every_second_page_dropped,
    zeroed,
    shifted,
    in_another_order_of_layers,
    in_another_order_of_pages,
    with_the_layer_before_in_place_of_the_last,
    with_values_in_place_of_keys,
    with_keys_as_values,
)
OF_GROUPS: Final = (oldest_seen_page_dropped, oldest_seen_page_zeroed, without_the_newest_page, *OF_KINDS)
OF_LATENTS: Final = (
    first_page_dropped,
    first_page_zeroed,
    shifted,
    in_another_order_of_layers,
    with_the_rotated_part_in_front,
)
OF_INDEX_KEYS: Final = (
    three_pages_dropped,
    zeroed,
    shifted,
    in_another_order_of_layers,
    in_another_order_of_pages,
)
MUTANTS: Final[dict[str, tuple[Mutant, ...]]] = {
    "latents": OF_LATENTS,
    "index keys": OF_INDEX_KEYS,
    "lent latents": OF_LATENTS,
    "index keys of those that borrow": OF_INDEX_KEYS,
    "windows": OF_KINDS,
    "wide heads": (first_page_dropped, first_page_zeroed, *OF_KINDS),
    "pages of wide heads": (first_page_dropped, zeroed, shifted, with_values_in_place_of_keys, with_keys_as_values),
    "pages of windows": OF_GROUPS,
    "pages of the last windows, which are lent": (zeroed, with_the_layer_before_in_place_of_the_last),
}
ROWS: Final = [(region, mutant) for region, mutants in MUTANTS.items() for mutant in mutants]
planted = pytest.mark.parametrize(
    ("region", "mutant"), ROWS, ids=[f"{region} {mutant.__name__}" for region, mutant in ROWS]
)
NewPair = Callable[..., Any]


def layout_of(source: ModelSource, num_pages: int = 1) -> PoolLayout:
    return ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")


def damaged(layout: PoolLayout, index: int, mutant: Mutant, before: Any, arrived: Any) -> Any:
    """Return whole pages, of any shape `[num_pages, ...]`, of which one region went through `mutant`."""
    flat_before, flat = (pages.reshape(len(pages), -1) for pages in (before, arrived))
    region, start = layout.regions[index], layout.offsets[index] // 4
    shape, end = (len(flat), *region.shape(PAGE_SIZE)[:3], -1), start + region.nbytes(PAGE_SIZE) // 4
    changed = mutant(*(pages[:, start:end].reshape(shape) for pages in (flat_before, flat)))
    parts = [flat[:, :start], changed.reshape(len(flat), -1), flat[:, end:]]
    return np.concatenate(parts, axis=1).reshape(arrived.shape)


def damaged_in_group(source: ModelSource, group: int, mutant: Mutant, before: Any, arrived: Any) -> Any:
    """Return whole pages of a group of layers, which lie at the beginning of each, gone through `mutant`."""
    kind, changed = source.config.kinds[group], arrived.reshape(len(arrived), -1).copy()
    num_layers = kind.num_layers - kind.num_borrowing
    shape = len(arrived), num_layers, 2, PAGE_SIZE, kind.num_kv_heads * kind.head_dim
    end = int(np.prod(shape[1:]))
    pages = (each.reshape(len(each), -1)[:, :end].reshape(shape) for each in (before, arrived))
    changed[:, :end] = mutant(*pages).reshape(len(arrived), -1)
    return changed.reshape(arrived.shape)


def of_group(cache: KvCache, pages: Any, group: int) -> Any:
    """Return which of some pages of a peer are those of a group."""
    is_of_tokens = np.isin(pages, cache.page_table)
    return is_of_tokens if group == 0 else np.isin(pages, cache.window_table[..., group - 1]) & ~is_of_tokens


def new_model_of(family: str, settings: dict[str, Any]) -> Any:
    config_name = {"Gemma4": "Gemma4Text", "MistralLarge4": "MistralLarge4Text"}.get(family, family)
    config = getattr(transformers, f"{config_name}Config")(**settings)
    if family != "MistralLarge4":
        return getattr(transformers, f"{family}ForCausalLM")(config)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = transformers.MistralLarge4Config(text_config=config, vision_config=vision)
    return transformers.MistralLarge4ForConditionalGeneration(whole)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSource]:
    found = {}
    for region, (family, settings, _) in MODELS.items():
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("region")
        model = new_model_of(family, settings)
        for name, parameter in model.named_parameters():
            if name.endswith("self_attn.q_norm.weight"):
                parameter.data *= 0.3  # so that a query sees more than a token or two
        model.save_pretrained(folder)
        source = open_model(str(folder))
        found[region] = keeping_all(source) if region in KEEPING else source
    return found


@pytest.fixture
def new_pair(sources: dict[str, ModelSource], make_pair: Any) -> NewPair:
    """`new_pair(region, integrity, mutant=None)`: a pair in which what arrives of a region goes through `mutant`."""

    class Damaging(make_pair):  # type: ignore[misc]  # a fixture has no type
        region = ""
        mutant: Mutant | None = None

        def _copy(self, side: Any, other: Any, write: Any) -> None:
            self._before = other.kv[write.dst].copy()
            super()._copy(side, other, write)

        def _damage(self, other: Any, pages: Any) -> None:
            if self.mutant is not None and self.region in GROUPS:
                hit = of_group(other.cache, pages, GROUPS[self.region])
                if hit.any():
                    found = other.kv[pages[hit]].copy()
                    change = GROUPS[self.region], self.mutant, self._before[hit], found
                    other.kv[pages[hit]] = damaged_in_group(sources[self.region], *change)
            elif self.mutant is not None:
                other.kv[pages] = damaged(
                    layout_of(sources[self.region]),
                    MODELS[self.region][2],
                    self.mutant,
                    self._before,
                    other.kv[pages].copy(),
                )

    def new(region: str, integrity: Any, mutant: Mutant | None = None) -> Any:
        def new_model(num_pages: int) -> tuple[Any, ModelRunner]:
            source = sources[region]
            kv = np.zeros(layout_of(source, num_pages).shape, np.float32)
            return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32")

        pair = Damaging(
            prefill_pages=NUM_PAGES,
            decode_pages=NUM_PAGES,
            max_step_tokens=64,
            model=new_model,
            rules=TransferRules(integrity=integrity),
            windows=window_pages(sources[region].config, 64),
        )
        pair.region, pair.mutant = region, mutant
        return pair

    return new


def generated(pair: Any, room: int) -> list[int]:
    pair.start(room, PROMPT, max_tokens=NUM_TOKENS)
    pair.run()
    tokens: list[int] = pair.tokens(room)
    return tokens


@pytest.fixture(scope="module")
def known() -> dict[str, list[int]]:
    """What has been generated without a mutant."""
    return {}


@pytest.fixture
def expected(new_pair: NewPair, region: str, known: dict[str, list[int]]) -> list[int]:
    if region not in known:
        known[region] = generated(new_pair(region, "always"), 1)
    return known[region]


@planted
def test_what_arrives_damaged_is_refused(new_pair: NewPair, region: str, mutant: Mutant) -> None:
    pair = new_pair(region, "always", mutant)
    generated(pair, 1)
    assert pair.decode.ended(1).failure.code is FailureCode.TRANSFER_FAILED
    pair.assert_clean()


@planted
def test_without_digests_it_changes_tokens(new_pair: NewPair, region: str, mutant: Mutant, expected: list[int]) -> None:
    tokens = generated(new_pair(region, "off", mutant), 1)
    assert len(tokens) == NUM_TOKENS
    assert tokens != expected


def cached(cache: KvCache, group: int) -> Any:
    """Return the pages of the only text that is cached that the prompt begins behind: of windows those that it sees."""
    (node,) = cache.tree._root.children.values()
    path = [node]
    while path[-1].children:
        path.extend(path[-1].children.values())
    num_pages = len(PROMPT) // PAGE_SIZE
    if not group:
        return np.concatenate([each.pages for each in path])[:num_pages]
    return next(
        (cache.tree.windows.live(each)[:, group - 1] for each in path if each.end == num_pages), path[0].pages[:0]
    )


@planted
def test_in_a_cache_it_changes_tokens(
    new_pair: NewPair, sources: dict[str, ModelSource], region: str, mutant: Mutant, expected: list[int]
) -> None:
    """The prompt's pages are read a second time, on both sides, by the same prompt."""
    pair = new_pair(region, "off")
    assert generated(pair, 1) == generated(pair, 2) == expected
    layout, index = layout_of(sources[region]), MODELS[region][2]
    for side in (pair.prefill, pair.decode):
        if region in GROUPS:
            pages = cached(side.cache, index)
            found = side.kv[pages].copy()
            if len(pages):  # decode is sent what windows see once more
                side.kv[pages] = damaged_in_group(sources[region], index, mutant, np.zeros_like(found), found)
            continue
        used = np.flatnonzero(side.kv.reshape(NUM_PAGES, -1).any(axis=1))
        assert len(used) >= len(PROMPT) // PAGE_SIZE
        side.kv[used] = damaged(layout, index, mutant, np.zeros_like(side.kv[used]), side.kv[used].copy())
    assert generated(pair, 3) != expected
