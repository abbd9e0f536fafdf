"""Which regions the pages of a model have, and how states lie in them: the one place that says so. Pure.

A state lies in a slot layer by layer, in pages unit by unit.
A unit is what of all layers can't be divided among ranks: a key head of a delta rule with its value heads, a group of a
state space, some channels of a short convolution. Each rank has as many units as any other, one behind the other. So
what ranks of another number want is one run of bytes of what each rank has, wherever the parts of a layer lie in slots.
In a unit is a cell of each layer, so what stages with other layers want is one run of bytes of each unit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.kvtransfer.layout import LINE_NBYTES, HeadShare, PoolLayout, Region, StateStage

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.architectures.recurrent import Recurrent, StatePart

_LARGE_CELL_NBYTES: Final = 16 << 10
_ROW_NBYTES: Final = 1024
STATE_ALIGNMENT: Final = 16  # bytes, of the parts of a state in a slot


def kv_regions(model: ModelConfig, dtype: str, share: HeadShare | None = None) -> tuple[Region, ...]:
    """Return those of `model` as a process computes it; `share` None: it has all heads.

    Those of a draft model lie behind its own, as layers that come behind its last. Of groups that take turns in a page
    only that of the text has something there: in pages of windows these places are empty.
    """
    total, num_ranks = (model.num_kv_heads, 1) if share is None else (share.total_kv_heads, share.num_ranks)
    own = own_regions(model, dtype, total, num_ranks)
    if model.draft is None:
        return own
    assert len(model.draft.model.page_groups) == 1, "its layers with a window keep all tokens"
    behind = own_regions(model.draft.model, dtype, model.draft.total_kv_heads, num_ranks)
    return (*own, *(_behind(region, model) for region in behind))


def _behind(region: Region, model: ModelConfig) -> Region:
    """Return a region of a draft model in pages of `model`: of stages the last one alone has its layers."""
    if model.stage is None:
        return _shifted(region, model.num_layers)
    shifted = _shifted(region, model.stage.num_layers)
    return replace(shifted, layers=shifted.layers if model.has_last_layer else (), total_layers=shifted.layers)


def own_regions(model: ModelConfig, dtype: str, total: int, num_ranks: int = 1) -> tuple[Region, ...]:
    """Return those of its own layers, which have `total` heads on all ranks.

    Keys and values are two planes. A latent is one, of one head that every rank computes and holds; so are the keys of
    an indexer, which lie behind the latents. Layers of two kinds have a region each, or where windows have pages of
    their own, take turns in one; those that borrow keys and values are in none.
    """
    groups = model.page_groups
    if has_unlike_groups(model):
        return (_of_unlike_groups(model, dtype, num_ranks),)
    if model.wide is not None:
        return _of_kinds(model, dtype, total)
    layers = tuple(filter(model.keeps, model.attention_layers))
    if len(groups) > 1:
        layers = tuple(range(max(map(len, groups))))
    stage = model.stage
    kept = Region(layers, model.num_planes, model.num_kv_heads, model.head_dim, dtype, total)
    kept = kept if stage is None else _in_model(kept, stage.first_kept, stage.kept)
    if model.indexer is None:
        return (kept,)
    chosen_by = Region(model.indexer.layers, 1, 1, model.indexer.head_dim, dtype, 1)
    return kept, chosen_by if stage is None else _in_model(chosen_by, stage.first_layer, stage.choosing)


def _of_kinds(model: ModelConfig, dtype: str, total: int) -> tuple[Region, ...]:
    regions, stage = [_of_kind(model, layers, dtype, total) for layers in model.layers_by_kind], model.stage
    if stage is None:
        return tuple(regions)
    pairs = zip(regions, stage.by_kind, strict=True)
    return tuple(_in_model(region, stage.first_layer, layers) for region, layers in pairs)


def _in_model(region: Region, first_layer: int, total_layers: tuple[int, ...]) -> Region:
    """Return the region of a stage, with the numbers that its layers have in the whole model."""
    return replace(_shifted(region, first_layer), total_layers=total_layers)


def has_unlike_groups(model: ModelConfig) -> bool:
    """Return whether groups of layers whose heads have several widths take turns in the same pages."""
    return model.wide is not None and len(model.page_groups) > 1


def _of_unlike_groups(model: ModelConfig, dtype: str, num_ranks: int) -> Region:
    """Return what holds any of the groups, whose layers begin where it begins.

    Who moves it sees one head for each rank: what one has is sent to the same one of a peer, and at most cast.
    """
    widths = [_width(model, layers[0]) for layers in model.page_groups]
    widest = max(len(layers) * width for layers, width in zip(model.page_groups, widths, strict=True))
    step = math.gcd(widest, *widths)
    return Region(tuple(range(widest // step)), model.num_planes, 1, step, dtype, num_ranks)


def _width(model: ModelConfig, layer: int) -> int:
    """Return the numbers of a token in a plane of `layer`, of this process."""
    return model.kv_heads_of(layer) * model.head_dim_of(layer)


def _shifted(region: Region, num_layers: int) -> Region:
    return replace(region, layers=tuple(num_layers + layer for layer in region.layers))


def _of_kind(model: ModelConfig, layers: tuple[int, ...], dtype: str, total: int) -> Region:
    """`total`: heads of layers that have no others."""
    kept, wide = tuple(filter(model.keeps, layers)), model.wide_at(layers[0])
    heads = model.kv_heads_of(layers[0]), model.head_dim_of(layers[0])
    return Region(kept, model.num_planes, *heads, dtype, total if wide is None else wide.total_kv_heads)


def region_names(model: ModelConfig) -> tuple[str, ...]:
    """Return in words what each of them holds."""
    own = _own_names(model)
    return own if model.draft is None else (*own, *(f"draft {name}" for name in _own_names(model.draft.model)))


def _own_names(model: ModelConfig) -> tuple[str, ...]:
    if model.num_planes > 1:
        is_split = model.wide is not None and not has_unlike_groups(model)
        return ("keys and values",) * (len(model.layers_by_kind) if is_split else 1)
    return ("latents",) if model.indexer is None else ("latents", "index keys")


def kv_layout(
    model: ModelConfig, num_pages: int, page_size: int, dtype: str, share: HeadShare | None = None
) -> PoolLayout:
    """Return a pool of such pages."""
    whole = share or HeadShare(0, 1, model.num_kv_heads)
    return PoolLayout(num_pages, page_size, kv_regions(model, dtype, share), whole.rank, whole.num_ranks)


def kv_shape(model: ModelConfig) -> str:
    """Return in words what must be equal between workers of a pair."""
    own = _attention_shape(model)
    states = "" if model.recurrent is None else f", {_state_shape(model)}"
    draft = "" if model.draft is None else f", draft layers: {kv_shape(model.draft.model)}"
    return f"{own}{states}{draft}"


def _state_shape(model: ModelConfig) -> str:
    assert model.recurrent is not None
    shapes = " and ".join("x".join(map(str, part.shape)) for part in model.recurrent.mixer.state_parts)
    return f"states of {shapes} in {len(model.recurrent.layers)} of them"


def _attention_shape(model: ModelConfig) -> str:
    if model.num_planes == 1:
        return f"{model.num_layers} layers, {_latents_shape(model)}"
    if model.wide is None:
        return f"{model.num_layers} layers, {model.num_kv_heads} KV heads of {model.head_dim}{_windows_shape(model)}"
    kept = tuple(filter(model.keeps, range(model.num_layers)))
    kinds = ([layer for layer in kept if bool(model.window(layer)) == slides] for slides in (True, False))
    return ", ".join(_kind_shape(model, tuple(layers)) for layers in kinds if layers) + _windows_shape(model)


def _windows_shape(model: ModelConfig) -> str:
    num_groups = len(model.page_groups) - 1
    sizes = " and ".join(map(str, sorted(set(model.windows) - {0})))
    turns = ", in turns" if num_groups > 1 and model.deals_windows else ""
    return f", windows of {sizes} in {num_groups} pages of their own{turns}" if num_groups else ""


def _latents_shape(model: ModelConfig) -> str:
    kept = sum(map(model.keeps, range(model.num_layers)))
    latents = f"latents of {model.head_dim}" + (f" in {kept} of them" if model.sources else "")
    if model.indexer is None:
        return latents
    return f"{latents}, index keys of {model.indexer.head_dim} in {len(model.indexer.layers)} of them"


def _kind_shape(model: ModelConfig, layers: tuple[int, ...]) -> str:
    return f"{len(layers)} layers, {model.kv_heads_of(layers[0])} KV heads of {model.head_dim_of(layers[0])}"


def window_pages(model: ModelConfig, step_tokens: int) -> WindowPages:
    """Return which pages of layers with a window are live; a step computes `step_tokens` of a prompt at most."""
    num_groups = len(model.page_groups) - 1
    return WindowPages(num_groups, max(model.windows), model.chunked, step_tokens) if num_groups else NO_WINDOWS


def window_terms(model: ModelConfig, layout: PoolLayout) -> str:
    """Return in words what must be equal, besides, where windows have pages of their own: "" where nothing must.

    A row of a page that groups of several widths share is no token's in all of them, so it cannot be moved by tokens.
    """
    if not has_unlike_groups(model):
        return ""
    return f", of {layout.page_size} tokens on {layout.num_ranks} rank{'s' if layout.num_ranks > 1 else ''}"


class Slice(NamedTuple):
    """What the units of a process have of one section of a part: the queries of a convolution, for example."""

    slot_offset: int  # where that of the first unit begins in a layer of a slot, bytes; the others are behind it
    cell_offset: int  # where it begins in a cell
    nbytes: int  # of one unit, in one layer


def state_part_nbytes(part: StatePart, dtype: str) -> int:
    """Return the bytes of what one layer keeps in a slot; `dtype` is that of layers."""
    nbytes = math.prod(part.shape) * _cell_nbytes(part, dtype)
    return -(-nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


def state_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of a slot, of all recurrent layers."""
    return len(recurrent.layers) * sum(state_part_nbytes(part, dtype) for part in recurrent.mixer.state_parts)


def given_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of what is kept of one token of a row until it is known whether it came true, of all layers."""
    return len(recurrent.layers) * recurrent.mixer.in_size * DTYPE_NBYTES[dtype]


def slices(recurrent: Recurrent, dtype: str) -> tuple[Slice, ...]:
    """Return those of a process, in the order of slots."""
    parts, num_units = recurrent.mixer.state_parts, recurrent.mixer.num_units
    starts = accumulate((state_part_nbytes(part, dtype) for part in parts), initial=0)
    found: list[Slice] = []
    cell_offset = 0
    for part, start in zip(parts, starts, strict=False):
        row = math.prod(part.shape[1:]) * _cell_nbytes(part, dtype)
        slot_offset = start
        for section in part.sections:
            nbytes = section // num_units * row
            found.append(Slice(slot_offset, cell_offset, nbytes))
            slot_offset += section * row
            cell_offset += nbytes
    return tuple(found)


def cell_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of a unit in one layer, in pages: whole lines, so that a device moves any number of them.

    Large ones are whole rows of what kernels move at a time, for pages of any heads.
    """
    nbytes = sum(each.nbytes for each in slices(recurrent, dtype))
    step = LINE_NBYTES if nbytes < _LARGE_CELL_NBYTES else _ROW_NBYTES
    return -(-nbytes // step) * step


def unit_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of a unit in pages, of all layers."""
    return len(recurrent.layers) * cell_nbytes(recurrent, dtype)


def share_nbytes(recurrent: Recurrent, dtype: str) -> int:
    """Return the bytes of the units of a process in pages."""
    return recurrent.mixer.num_units * unit_nbytes(recurrent, dtype)


def with_states(layout: PoolLayout, model: ModelConfig, dtype: str, num_pages: int = 0) -> PoolLayout:
    """Return a pool whose pages also hold states; `model` is what this process computes, `dtype` that of its layers.

    `num_pages`: of a state, in all stages of a pipeline of which `model` is one.
    """
    if model.recurrent is None:
        return layout
    if model.stage is None:
        return replace(layout, state_nbytes=layout.num_ranks * share_nbytes(model.recurrent, dtype))
    num_units, every = layout.num_ranks * model.recurrent.mixer.num_units, model.stage.recurrent
    first = every.index(model.recurrent.layers[0] + model.stage.first_layer)
    stage = StateStage(num_units, first, len(model.recurrent.layers), len(every), num_pages)
    nbytes = num_units * len(every) * cell_nbytes(model.recurrent, dtype)
    return replace(layout, state_nbytes=nbytes, state_stage=stage)


def pages_per_state(model: ModelConfig, num_ranks: int, dtype: str, layout: PoolLayout) -> int:
    """Return how many pages hold a rank's part of a state; 0 for a model without. `dtype` is that of its layers."""
    if model.recurrent is None:
        return 0
    if layout.state_stage is not None:
        return layout.state_stage.num_pages
    return -(-share_nbytes(model.recurrent.of_rank(num_ranks), dtype) // layout.page_nbytes)


def state_terms(dtype: str) -> str:
    """Return in words what must be equal, besides, where states are handed over: their bytes are never cast."""
    return f"by units and layers, with {dtype}"


def _cell_nbytes(part: StatePart, dtype: str) -> int:
    return DTYPE_NBYTES["float32" if part.is_wide else dtype]
