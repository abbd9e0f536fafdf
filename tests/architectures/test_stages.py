from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tiny_config import tiny_config

from diptych.architectures.config import DraftLayers, Indexer, Latent, ModelConfig, Moe, Stage, WideHeads
from diptych.architectures.placement import llama
from diptych.architectures.recurrent import Recurrent, ShortConv
from diptych.architectures.stages import check_stages, of_stage, stage_layers, target_in_stage
from diptych.common.errors import ConfigError
from diptych.engine.values.kv_regions import kv_regions

MOE = Moe(num_experts=4, experts_per_token=2, ffn_size=32, normalize=True, dense_layers=frozenset({0, 1}))
MIXER = ShortConv(64, 3)
MODEL = tiny_config(num_layers=7)


def weights(config: ModelConfig) -> list[int]:
    """By layer, with what is before and behind them."""
    found = [0] * config.num_layers
    for _, (piece,) in llama(config):
        number, size = piece.target.partition(".")[0], piece.shape[0] * (piece.shape[1] if len(piece.shape) > 1 else 1)
        if number.isdecimal():
            found[int(number)] += size
        elif number == "embed":
            found[0] += size
            found[-1] += size * config.tie_embeddings
        else:
            found[-1] += size
    return found


@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("moe", [None, MOE])
def test_no_other_cut_has_a_lighter_heaviest_stage(num_stages: int, tied: bool, moe: Moe | None) -> None:
    model = replace(MODEL, tie_embeddings=tied, moe=moe)
    stages, each = stage_layers(model, num_stages), weights(model)
    assert [layer for stage in stages for layer in stage] == list(range(7))
    assert min(map(len, stages)) > 0
    every = [(0, *cuts, 7) for cuts in itertools.combinations(range(1, 7), num_stages - 1)]
    heaviest = [max(sum(each[start:end]) for start, end in itertools.pairwise(cuts)) for cuts in every]
    assert max(sum(each[stage.start : stage.stop]) for stage in stages) == min(heaviest)


def test_of_cuts_that_weigh_nearly_the_same_one_leaves_no_stage_more_layers_that_keep_tokens_than_it_must() -> None:
    """As many pages as the stage with most of these has room for."""
    attending = (0, 10, 198, 350)
    mixing = Recurrent(tuple(layer for layer in range(400) if layer not in attending), ShortConv(MODEL.hidden_size, 3))
    model = replace(MODEL, num_layers=400, windows=(0,) * 400, recurrent=mixing, vocab_size=8)
    stages = stage_layers(model, 2)
    assert [sum(layer in stage for layer in attending) for stage in stages] == [2, 2]


def test_a_stage_is_a_model_of_its_layers_which_it_counts_from_0() -> None:
    windows = (0, 8, 8, 8, 0, 8, 8)
    model = replace(MODEL, windows=windows, keeps_all=True, moe=MOE, still_layers=frozenset({2, 4}))
    model = replace(model, tie_embeddings=True)
    stage = of_stage(model, range(1, 5))
    assert (stage.num_layers, stage.windows, stage.stage) == (4, (8, 8, 8, 0), Stage(1, 7, (*range(7),), 1, ()))
    assert (stage.still_layers, [stage.is_moe(layer) for layer in range(4)]) == (
        frozenset({1, 3}),
        [False, True, True, True],
    )
    assert (stage.has_first_layer, stage.has_last_layer, stage.tie_embeddings) == (False, False, False)
    assert stage.page_groups == ((0, 1, 2, 3),)
    ends = [of_stage(model, each) for each in (range(1), range(5, 7))]
    assert [(end.has_first_layer, end.has_last_layer, end.tie_embeddings) for end in ends] == [
        (True, False, False),
        (False, True, True),
    ]


def test_each_stage_has_layers_that_attend_and_layers_that_keep_a_state() -> None:
    """However heavy it is: here most weights are in the first layers, none of which attends."""
    heavy = Moe(num_experts=64, experts_per_token=2, ffn_size=64, normalize=True, dense_layers=frozenset(range(3, 8)))
    model = tiny_config(num_layers=8, moe=heavy, recurrent=Recurrent((0, 1, 2, 4, 5, 7), MIXER), ffn_only=frozenset())
    assert stage_layers(model, 2) == (range(4), range(4, 8))
    found = [of_stage(model, layers) for layers in stage_layers(model, 2)]
    assert [each.recurrent and each.recurrent.layers for each in found] == [(0, 1, 2), (0, 1, 3)]
    assert [each.attention_layers for each in found] == [(3,), (2,)]
    assert {each.stage and (each.stage.kept, each.stage.recurrent) for each in found} == {((3, 6), (0, 1, 2, 4, 5, 7))}
    with pytest.raises(ConfigError, match=r"--pp 3 is more than the 2 layers of .* that attend"):
        stage_layers(model, 3)
    apart = replace(model, recurrent=Recurrent((0, 1, 2, 3), MIXER))
    with pytest.raises(ConfigError, match=r"--pp 2: no cut gives each stage of .* layers that attend, and layers that"):
        stage_layers(apart, 2)


def test_no_stage_begins_behind_what_its_first_layer_attends_to() -> None:
    choosing = Indexer(num_heads=2, head_dim=8, num_kept=4, interleaved=False, layers=(0, 2, 3, 6))
    latent = Latent(16, 16, 8, 8, 8, False, 1e-6)
    model = tiny_config(num_layers=8, latent=latent, num_kv_heads=1, head_dim=24, indexer=choosing)
    assert [stage_layers(model, 2), stage_layers(model, 3)[-1]] == [(range(3), range(3, 8)), range(6, 8)]
    sharing = replace(model, sources=(0, 0, 2, 2, 2, 2, 6, 6))
    cuts = stage_layers(sharing, 3)
    assert cuts == (range(2), range(2, 6), range(6, 8))
    stage = of_stage(sharing, cuts[1])
    assert (stage.sources, stage.indexer and stage.indexer.layers) == ((0, 0, 0, 0), (0, 1))
    latents, index_keys = kv_regions(stage, "float32")
    assert (latents.layers, latents.total_layers) == ((2,), (0, 2, 6))
    assert (index_keys.layers, index_keys.total_layers) == ((2, 3), (0, 2, 3, 6))
    with pytest.raises(ConfigError, match=r"--pp 4: no cut gives each stage of .* attend to what layers of the stage"):
        stage_layers(sharing, 4)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_before_the_layers_is_the_first_stages_and_what_is_behind_them_the_last_ones(tied: bool) -> None:
    names = ("embed", "vision.0.qkv", "0.qkv", "3.experts.2.down", "6.o", "norm", "lm_head")
    found = [
        [target_in_stage(name, layers, 7, tied=tied) for name in names]
        for layers in (range(2), range(2, 4), range(4, 7))
    ]
    assert found == [
        ["embed", "vision.0.qkv", "0.qkv", None, None, None, None],
        [None, None, None, "1.experts.2.down", None, None, None],
        ["embed" if tied else None, None, None, None, "2.o", "norm", "lm_head"],
    ]


def test_what_stages_can_not_have_is_refused_in_words() -> None:
    """Families that a pipeline is not for are in `tests/engine/runner/test_families.py`."""
    with pytest.raises(ConfigError, match="--pp 8 is more than the 7 layers"):
        check_stages(MODEL, 8)
    windowed = replace(MODEL, windows=(0, 8, 8, 0, 8, 8, 8))
    with pytest.raises(ConfigError, match="pages of their own, not all full: --kv-windows keep gives"):
        check_stages(windowed, 2)
    check_stages(windowed, 1)
    check_stages(replace(windowed, keeps_all=True), 2)
    with pytest.raises(ConfigError, match=r"no cut gives .* as many layers of each window's pages as of those that"):
        stage_layers(replace(MODEL, windows=(0, 8, 8, 0, 8, 8), num_layers=6), 3)


def test_layers_that_guess_beside_states_are_refused_in_words() -> None:
    model = tiny_config(num_layers=8, recurrent=Recurrent((0, 1, 2, 4, 5, 6), MIXER))
    check_stages(model, 2)
    with pytest.raises(ConfigError, match="states lie in pages that have no other layers: give --speculate suffix"):
        check_stages(replace(model, draft=DraftLayers(tiny_config(num_layers=1), 1)), 2)


def test_stages_with_windows_of_their_own_have_the_same_places_of_all_groups() -> None:
    model = tiny_config(num_layers=12, windows=(8, 8, 8, 0) * 3)
    assert model.page_groups == ((3, 7, 11), (0, 4, 8), (1, 5, 9), (2, 6, 10))
    cuts = stage_layers(model, 2)
    assert cuts == (range(8), range(8, 12))
    first, last = (of_stage(model, layers) for layers in cuts)
    assert first.page_groups == ((3, 7), (0, 4), (1, 5), (2, 6))
    assert last.page_groups == ((3,), (0,), (1,), (2,))
    regions = [kv_regions(each, "float32")[0] for each in (first, last)]
    assert [(each.layers, each.total_layers) for each in regions] == [((0, 1), (0, 1, 2)), ((2,), (0, 1, 2))]
    assert [stage_layers(model, 3)[-1], len(stage_layers(model, 3))] == [range(8, 12), 3]


def test_each_stage_has_layers_of_both_widths() -> None:
    """However the weights lie. Of both it says which the whole model has."""
    windows = (8, 8, 8, 0, 8, 8, 0, 8)
    model = tiny_config(num_layers=8, windows=windows, keeps_all=True, wide=WideHeads(32, 1, 1, 2))
    cuts = stage_layers(model, 2)
    assert cuts == (range(4), range(4, 8))
    slides, sees_all = kv_regions(of_stage(model, cuts[1]), "float32")
    assert (slides.layers, slides.total_layers) == ((4, 5, 7), (0, 1, 2, 4, 5, 7))
    assert (sees_all.layers, sees_all.total_layers, sees_all.head_dim) == ((6,), (3, 6), 32)
    with pytest.raises(ConfigError, match=r"--pp 3 is more than the 2 layers of .* without one"):
        stage_layers(model, 3)
