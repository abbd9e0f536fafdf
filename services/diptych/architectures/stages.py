"""Which layers each stage of a pipeline has, and what a stage is as a model of its own. Pure.

Stages have neighbouring layers. Embeddings are the first one's, as is a tower of images, with all layers that its rows
are added to; the last norm and the output projection are the last one's, and so is what guesses by layers of its own.
Where the projection is the embedding, or who guesses reads it, both have it. The
cut is the one whose heaviest stage is lightest, by numbers in weights, among those that give each stage layers of each
kind that keeps something: pages are what these have of tokens. No stage begins between a layer and one that attends to
what it has chosen or kept. Of cuts that weigh nearly the same it is the one with most pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Final

from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig, Stage

_EMBEDDING: Final = "embed"  # how targets before the layers begin,
_BEFORE: Final = (_EMBEDDING, "vision.")  # or those that make rows in place of embeddings
_OWN: Final = "a first layer from which on all attend to what layers of the stage choose and keep"
NEARLY: Final = 1.01  # of the lightest that the heaviest stage may weigh, where that leaves more pages
_PLACES: Final = "as many layers of each window's pages as of those that see all: --kv-windows keep needs none"

Cost = tuple[int, ...]


def stage_layers(config: ModelConfig, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, in order. Raises `ConfigError` where the model can't have so many."""
    if num_stages == 1:
        return (range(config.num_layers),)
    check_stages(config, num_stages)
    cuts = _best_cut(_weights(config), num_stages, [*_kinds(config).values()], _ends(config))
    if cuts is None:
        raise ConfigError(f"--pp {num_stages}: no cut gives each stage of {config.model_id} {_lacking(config)}")
    return tuple(range(start, end) for start, end in pairwise((0, *cuts, config.num_layers)))


def _lacking(config: ModelConfig) -> str:
    """Say what each stage is to have."""
    if config.indexer is not None or config.sources:
        return _OWN
    return ", and ".join(f"layers {words}" for words in _kinds(config)) if len(config.page_groups) == 1 else _PLACES


def of_stage(config: ModelConfig, layers: range) -> ModelConfig:
    """Return the model that has these layers alone, and counts them from 0."""

    def own(numbers: frozenset[int]) -> frozenset[int]:
        return frozenset(number - layers.start for number in numbers if number in layers)

    span, recurrent, indexer = slice(layers.start, layers.stop), config.recurrent, config.indexer
    return replace(
        config,
        num_layers=len(layers),
        stage=_stage(config, layers),
        windows=config.windows[span],
        keeps_all=True,  # which layers take turns in a page is a matter of the whole model: see `Stage.groups`
        kv_scales=config.kv_scales[span],
        still_layers=own(config.still_layers),
        tower=config.tower if layers.start == 0 else None,
        recurrent=recurrent and replace(recurrent, layers=tuple(sorted(own(frozenset(recurrent.layers))))),
        indexer=indexer and replace(indexer, layers=tuple(sorted(own(frozenset(indexer.layers))))),
        sources=tuple(source - layers.start for source in config.sources[span]),
        ffn_only=own(config.ffn_only),
        without_ffn=own(config.without_ffn),
        moe=config.moe and replace(config.moe, dense_layers=own(config.moe.dense_layers)),
        tie_embeddings=config.tie_embeddings and layers.stop == config.num_layers,
    )


def _stage(config: ModelConfig, layers: range) -> Stage:
    from diptych.architectures.config import Stage

    groups, states = config.page_groups, _state_layers(config)
    if len(groups) == 1:
        kept, choosing = tuple(filter(config.keeps, config.attention_layers)), _choosing_layers(config)
        by_kind = () if config.wide is None else config.layers_by_kind
        return Stage(layers.start, config.num_layers, kept, layers.start, states, (), choosing, by_kind)
    own = tuple(tuple(layer - layers.start for layer in group if layer in layers) for group in groups)
    places, first = tuple(range(len(groups[0]))), sum(layer < layers.start for layer in groups[0])
    return Stage(layers.start, config.num_layers, places, first, states, own)


def target_in_stage(target: str, layers: range, num_layers: int, *, tied: bool) -> str | None:
    """Return what a stage calls a target of the model, which has so many layers; None: the stage has it not."""
    number, _, rest = target.partition(".")
    if number.isdecimal():
        return f"{int(number) - layers.start}.{rest}" if int(number) in layers else None
    is_first, is_last = layers.start == 0, layers.stop == num_layers
    is_shared = tied and target.startswith(_EMBEDDING)
    has = (is_first and target.startswith(_BEFORE)) or (is_last and (is_shared or not target.startswith(_BEFORE)))
    return target if has else None


def check_stages(config: ModelConfig, num_stages: int) -> None:
    """Raise `ConfigError` where the layers of a model can't be dealt out to so many stages."""
    if num_stages == 1:
        return
    if num_stages > config.num_layers:
        raise ConfigError(f"--pp {num_stages} is more than the {config.num_layers} layers of {config.model_id}")
    for words, kind in _kinds(config).items():
        if num_stages > len(kind):
            raise ConfigError(f"--pp {num_stages} is more than the {len(kind)} layers of {config.model_id} {words}")
    for words in _obstacles(config):
        raise ConfigError(f"--pp is not for {config.model_id}: {words}; give --tp, or more workers")


def _obstacles(config: ModelConfig) -> Iterator[str]:
    """Yield what of a model a stage can't have alone, in words."""
    if config.encoder is not None or config.pooling is not None:
        yield "it makes vectors, and stages hand on what becomes text"
    if config.taps:
        yield "an EAGLE-3 head reads three layers, which are in several stages: give --speculate mtp, draft:, or suffix"
    if config.draft is not None and config.recurrent is not None:
        yield "states lie in pages that have no other layers: give --speculate suffix or ngram"
    if config.num_borrowing:
        yield "layers borrow keys and values"
    if config.per_layer_dim:
        yield "each layer takes an embedding of its own"
    if len(config.page_groups) > 1 and not config.deals_windows:
        yield "layers with a window have pages of their own, not all full: --kv-windows keep gives all layers the same"


def _kinds(config: ModelConfig) -> dict[str, frozenset[int]]:
    """Return the layers of which each stage has some, by words: those that keep something of tokens, and states if
    there are; or those of each form of keys and values, where these are two.
    """
    attending = frozenset(config.attention_layers)
    kinds = {"that attend": attending, "that keep a state": frozenset(_state_layers(config))}
    if config.wide is not None:
        slides = frozenset(layer for layer in attending if config.window(layer))
        kinds |= {"with a window": slides, "without one": attending - slides}
    return {words: layers for words, layers in kinds.items() if layers}


def _ends(config: ModelConfig) -> frozenset[int]:
    """Return before which layers a stage may end: it has as many of each group of pages, as they have common places.

    And those behind it attend to nothing that layers before it choose or keep, and no rows of images are added there.
    """
    num_taps = len(config.tower.taps) if config.tower else 0
    groups, every = config.page_groups, range(1 + num_taps, config.num_layers + 1)
    even = (end for end in every if len({sum(layer < end for layer in group) for group in groups}) == 1)
    return frozenset(end for end in even if _depends_on_none(config, end))


def _depends_on_none(config: ModelConfig, end: int) -> bool:
    """Return whether the layers from `end` on attend to what they choose and keep themselves."""
    chooses = config.indexer is None or end == config.num_layers or config.chooses(end)
    return chooses and all(source >= end for source in config.sources[end:])


def _state_layers(config: ModelConfig) -> tuple[int, ...]:
    return config.recurrent.layers if config.recurrent else ()


def _choosing_layers(config: ModelConfig) -> tuple[int, ...]:
    return config.indexer.layers if config.indexer else ()


def _weights(config: ModelConfig) -> list[int]:
    """Return the numbers in each layer's weights, those before and behind the layers with their neighbours."""
    from diptych.architectures.registry import placement_of  # which imports all families

    weights, last = [0] * config.num_layers, config.num_layers - 1
    for _, pieces in placement_of(config):
        for piece in pieces:
            number, size = piece.target.partition(".")[0], prod(piece.shape)
            if number.isdecimal():
                weights[int(number)] += size
                continue
            for layer in (0, last):
                layers, tied = range(layer, layer + 1), config.embeds_behind
                if target_in_stage(piece.target, layers, config.num_layers, tied=tied) is not None:
                    weights[layer] += size
    if config.draft is not None:
        weights[last] += _own_weights(config.draft.model)
    return weights


def _own_weights(draft: ModelConfig) -> int:
    """Return the numbers in the weights of who guesses, all of which the last stage has."""
    from diptych.architectures.next_layer import placement_of

    return sum(prod(piece.shape) for _, pieces in placement_of(draft)(draft) for piece in pieces)


def _best_cut(
    weights: Sequence[int], num_stages: int, kinds: Sequence[frozenset[int]], ends: frozenset[int]
) -> tuple[int, ...] | None:
    """Return where stages behind the first begin; None: there is no way. Each has layers of all `kinds`, one of `ends`.

    Of those whose heaviest stage is nearly as light as can be, the cut that leaves fewest layers which keep tokens in
    any stage: all stages have as many pages as that one has room for.
    """
    sums = (0, *accumulate(weights))
    places = (0, *accumulate(layer in kinds[0] for layer in range(len(weights))))

    def weight(start: int, end: int) -> tuple[int, ...] | None:
        return (sums[end] - sums[start],)

    lightest = _least_cut(weight, len(weights), num_stages, kinds, ends)
    if lightest is None:
        return None
    bound = NEARLY * lightest[0][0]

    def places_of(start: int, end: int) -> tuple[int, ...] | None:
        own = sums[end] - sums[start]
        return None if own > bound else (places[end] - places[start], own)

    found = _least_cut(places_of, len(weights), num_stages, kinds, ends)
    return found and found[1]


def _least_cut(
    cost: Callable[[int, int], Cost | None],
    num_layers: int,
    num_stages: int,
    kinds: Sequence[frozenset[int]],
    ends: frozenset[int],
) -> tuple[Cost, tuple[int, ...]] | None:
    """Return the cut whose dearest stage costs least, and what that costs; None: there is no way.

    `cost` of layers from one to before another; None: they are no stage. Of several such cuts the one that gives
    earlier stages more: the last one samples, too.
    """
    best: dict[int, tuple[Cost, tuple[int, ...]]] = {0: ((), ())}  # by layers dealt out: the dearest, and the cuts
    for stage in range(num_stages):
        found = {end: _least_before(best, cost, end, kinds) for end in range(stage + 1, num_layers + 1) if end in ends}
        best = {end: way for end, way in found.items() if way is not None}
    return best.get(num_layers)


def _least_before(
    best: Mapping[int, tuple[Cost, tuple[int, ...]]],
    cost: Callable[[int, int], Cost | None],
    end: int,
    kinds: Sequence[frozenset[int]],
) -> tuple[Cost, tuple[int, ...]] | None:
    """Return the best way to deal out `end` layers with one stage more than `best` does; None: there is none."""
    last = min(max(layer for layer in kind if layer < end) if min(kind) < end else -1 for kind in kinds)
    starts = [start for start in best if start <= last]
    ways = [(max(best[start][0], own), start) for start in starts if (own := cost(start, end)) is not None]
    found = min(ways, key=lambda way: (way[0], -way[1]), default=None)
    if found is None:
        return None
    dearest, start = found
    return dearest, ((*best[start][1], start) if start else ())
