"""The layer behind a model's last one that predicts one token more (arXiv 2412.19437, 2.2), as a model of one layer.

It reads the embedding of a token and, of the token before, the row that the output projection is given: both are
normed, lie side by side, and one matrix makes a hidden row of them. Embedding and output projection are the model's.
Applied to a row of its own, it predicts one token more still. Of a checkpoint with a layer for each distance the first
alone is read, as this is what it was trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from diptych.architectures import eagle, placement, registry
from diptych.architectures.config import ModelConfig
from diptych.architectures.placement import Placed
from diptych.architectures.registry import FAMILIES
from diptych.common.errors import ConfigError

SHARED: Final = ("embed", "lm_head")  # targets of the model that it reads, too
_PREFIX: Final = "model.layers.0."


def next_layer(config: ModelConfig) -> ModelConfig:
    """Return the layer as a model by itself. Raises `ConfigError` where no checkpoint of `config` has one."""
    if FAMILIES[config.architecture].next_name is None:
        raise ConfigError(f"--speculate mtp: the layers of {config.model_id} that predict more tokens are not read yet")
    if not config.num_next_layers:
        raise ConfigError(f"--speculate mtp: {config.model_id} has no layer that predicts one token more")
    return replace(
        config,
        num_layers=1,
        num_next_layers=0,
        joins_rows=True,
        tie_embeddings=False,
        moe=config.moe and replace(config.moe, dense_layers=frozenset()),
        recurrent=None,  # it attends in every family
        kv_scales=(),
        draft=None,
    )


def placement_of(config: ModelConfig) -> Callable[[ModelConfig], Iterator[Placed]]:
    """Return where the tensors of a model go, of such a layer, or of an EAGLE head."""
    if config.eagle is not None:
        return eagle.placement_of
    return _next_placement if config.joins_rows else registry.placement_of


def _next_placement(config: ModelConfig) -> Iterator[Placed]:
    for name, pieces in FAMILIES[config.architecture].placement(config):
        if pieces[0].target not in SHARED:
            yield name, pieces
    hidden = config.hidden_size
    yield placement.whole(f"{_PREFIX}enorm.weight", "token_norm", (hidden,))
    yield placement.whole(f"{_PREFIX}hnorm.weight", "row_norm", (hidden,))
    yield placement.whole(f"{_PREFIX}eh_proj.weight", "join", (hidden, 2 * hidden))
