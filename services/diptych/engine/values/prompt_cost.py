"""What a token of a prompt costs to compute, by how much lies before it: attention looks at all of that.

So that no step takes much longer than another, what a step may compute is a budget of costs, not of tokens: far into a
long prompt its chunks become shorter. Costs are counted in tokens at the start of a prompt. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.engine.values.step import Chunk

MIN_CHUNK: Final = 16  # tokens, however dear: weights are read once a step
STEP_COST: Final = 160  # of a step beside its tokens: an H200 reads weights for as long as it computes so many tokens
LATER: Final = 6  # prompts that come, for each that waits, before a queue ends: tried by `bench/prompt_steps.py`


@dataclass(frozen=True, slots=True)
class PromptCost:
    """How the cost of a token grows with its position."""

    even_len: float = math.inf  # tokens before it whose attention costs as much as all of the weights
    step_cost: int = STEP_COST

    def chunk_len(self, start: int, budget: int) -> int:
        """Return how many tokens from `start` on a budget pays for, or `MIN_CHUNK` of them; never more than it."""
        return min(budget, max(MIN_CHUNK, int(budget / self._rate(start))))

    def of(self, start: int, num_tokens: int) -> int:
        """Return what a chunk costs."""
        return math.ceil(num_tokens * self._rate(start))

    def of_chunks(self, chunks: Iterable[Chunk]) -> int:
        """Return what the chunks of a step cost."""
        return sum([self.of(chunk.start, chunk.num_tokens) for chunk in chunks])

    def pays_to_wait(self, start: int, num_tokens: int) -> bool:
        """Return whether a prompt should begin a step later to save a chunk that another one is computing already.

        The other one goes without the cost of that chunk, and this one waits for a step: so the mean is earlier.
        """
        return 2 * self.of(start, num_tokens) > self.step_cost

    def _rate(self, start: int) -> float:
        return 1 + start / self.even_len


def pays_to_share(cost: int, num_complete: int, num_waiting: int) -> bool:
    """Return whether a prompt's next chunk should be in a step that completes `num_complete` prompts before it.

    Those get their first tokens later by what the chunk costs. Else all that wait, `num_waiting` with this one, and all
    that come meanwhile, have theirs later by one more step at most: so a long queue is packed, and a short one is not.
    """
    return num_complete * cost <= num_waiting * LATER * STEP_COST


SAME_EVERYWHERE: Final = PromptCost()


def prompt_cost(config: ModelConfig) -> PromptCost:
    """Count multiplications. A layer with a window looks at no more than that, and so is left out; so is a state."""
    layers = range(config.num_layers)
    weights = sum(_mixing_size(config, i) + 3 * config.hidden_size * _ffn_size(config, i) for i in layers)
    wide = [layer for layer in config.attention_layers if not config.window(layer)]
    per_position = sum(config.num_heads * config.head_dim_of(i) + config.attended_size_of(i) for i in wide)
    return PromptCost(weights / per_position if per_position else math.inf)


def _mixing_size(config: ModelConfig, layer: int) -> int:
    """The weights of a layer's projections."""
    if config.recurrent is None or not config.is_recurrent(layer):
        return _attention_size(config, layer)
    return config.hidden_size * (config.recurrent.mixer.in_size + config.recurrent.mixer.out_size)


def _attention_size(config: ModelConfig, layer: int) -> int:
    latent, heads = config.latent_of(layer), config.num_heads
    if latent is None:
        return config.hidden_size * (config.qkv_size_of(layer) + config.attended_size_of(layer))
    queries = heads * latent.query_dim
    of_queries = (
        latent.query_rank * (config.hidden_size + queries) if latent.query_rank else config.hidden_size * queries
    )
    of_heads = heads * (latent.rank * (latent.nope_dim + latent.value_dim) + config.hidden_size * latent.value_dim)
    return of_queries + config.hidden_size * latent.key_dim * config.keeps(layer) + of_heads


def _ffn_size(config: ModelConfig, layer: int) -> int:
    """The size of all feed-forward networks that a token passes."""
    moe = config.moe
    if moe is None or not config.is_moe(layer):
        return config.ffn_size_of(layer)
    beside = config.ffn_size_of(layer) if moe.beside_dense else moe.shared_ffn_size
    return moe.experts_per_token * moe.ffn_size + beside
