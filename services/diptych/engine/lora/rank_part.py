"""Which part of an adapter a tensor-parallel rank has: it is cut as the matrix that it changes. Pure.

Of a matrix that is cut by rows (what is computed), B is cut; by columns (what is read), A is: the partial products are
added up with those of the matrix itself. Every rank changes embeddings as a whole, after they are looked up. The
output's part is all rank 0's, where the logits are. A stage of a pipeline has what changes its layers, the first one
also the embedding's, and the last one the output's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from diptych.architectures.config import ModelConfig
from diptych.architectures.placement import Placed, Split, with_output
from diptych.architectures.registry import FAMILIES
from diptych.checkpoints.shard import Cut, Shard, in_stage
from diptych.engine.lora.registry import EMBEDDING, OUTPUT, Adapter, Product

_WHOLE: Final = (EMBEDDING, OUTPUT)


def rank_adapter(adapter: Adapter, model: ModelConfig, shard: Shard) -> Adapter:
    """Return what a rank adds of an adapter of `model`. The fingerprint is that of the whole."""
    if shard.size == 1 and shard.layers is None:
        return adapter
    cuts = {(cut.full.target, cut.full.start): cut for _, each in _cuts(model, shard) for cut in each}
    return replace(adapter, products=tuple(_parts(adapter.products, cuts, shard.rank)))


def adapted_placement(model: ModelConfig, shard: Shard) -> Iterator[Placed]:
    """Yield the matrices as a rank's adapters see them: its part of each that it has, but the whole vocabulary.

    Among them is the output projection, see `with_output`.
    """
    for name, cuts in _cuts(model, shard):
        if not cuts:  # an expert of other ranks, or another stage's
            continue
        is_whole = cuts[0].full.target in _WHOLE
        yield name, tuple(cut.full if is_whole else cut.local for cut in cuts)


def _cuts(model: ModelConfig, shard: Shard) -> list[tuple[str, tuple[Cut, ...]]]:
    family, layers = FAMILIES[model.architecture], shard.layers
    cuts = replace(shard, layers=None).placement(model, lambda config: with_output(family.placement(config)))
    if layers is None:
        return cuts
    return [(name, in_stage(each, layers, model.num_layers, tied=False)) for name, each in cuts]  # each end is one's


def _parts(products: Iterable[Product], cuts: dict[tuple[str, int], Cut], rank: int) -> Iterator[Product]:
    for product in products:
        cut = cuts.get((product.target, product.start))
        if cut is None:  # another stage's
            continue
        if product.target == EMBEDDING or (product.target == OUTPUT and rank == 0):
            yield product
        elif product.target != OUTPUT:
            yield _part(product, cut)


def _part(product: Product, cut: Cut) -> Product:
    match cut.full.split:
        case Split.NONE:
            a, b = product.a, product.b
        case Split.ROWS:
            a, b = product.a, product.b[cut.start : cut.start + cut.local.shape[0]]
        case Split.COLUMNS:
            a, b = product.a[:, cut.start : cut.start + cut.local.shape[1]], product.b
    return Product(cut.local.target, cut.local.start, np.ascontiguousarray(a), np.ascontiguousarray(b))
