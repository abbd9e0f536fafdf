"""Chooses the next token of every row of a batch in one pass.

Rule: a row's token depends on its logits, its parameters, its seed and its position, never on the other rows or on the
process that samples. One uniform number per row, hashed from (seed, position), is looked up in the cumulative
distribution over token ids, so a replay elsewhere continues with the same tokens.
Order, as in transformers: temperature, then top-k, then top-p of what is left.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diptych.engine.batch import I64, U64, SamplingBatch

NUCLEUS_CANDIDATES = 1024  # top-p looks at so many tokens before it sorts the whole vocabulary


def sample(logits: Tensor, sampling: SamplingBatch) -> I64:
    """Return token ids `[num_samples]` for logits `[num_samples, vocab_size]`."""
    tokens: I64 = logits.argmax(dim=-1).numpy()
    random = np.flatnonzero(sampling.temperature > 0)
    if len(random):
        tokens[random] = _draw(logits[torch.from_numpy(random)].float(), _select(sampling, random))
    return tokens


def uniforms(seeds: U64, positions: I64) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return one number in [0, 1) for each (seed, position)."""
    mixed = _splitmix64(_splitmix64(seeds) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: U64) -> U64:
    """The finaliser of Steele, Lea and Flood's SplitMix64 (2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _select(sampling: SamplingBatch, rows: I64) -> SamplingBatch:
    return SamplingBatch(
        temperature=sampling.temperature[rows],
        top_p=sampling.top_p[rows],
        top_k=sampling.top_k[rows],
        seeds=sampling.seeds[rows],
        positions=sampling.positions[rows],
    )


def _draw(logits: Tensor, sampling: SamplingBatch) -> I64:
    temperature = torch.from_numpy(sampling.temperature)[:, None]
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    scaled = _keep_top_k(scaled, torch.from_numpy(sampling.top_k))
    scaled = _keep_top_p(scaled, torch.from_numpy(sampling.top_p))
    cumulative = scaled.exp().cumsum(dim=-1, dtype=torch.float64)
    targets = torch.from_numpy(uniforms(sampling.seeds, sampling.positions))[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    result: I64 = drawn.numpy()
    return result


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Set all but each row's `top_k` largest to -inf; ties with the smallest of them stay."""
    vocab_size = scaled.shape[1]
    counts = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    rows = torch.nonzero(counts < vocab_size).squeeze(1)
    if len(rows) == 0:
        return scaled
    largest = scaled[rows].topk(int(counts[rows].max()), dim=-1).values
    threshold = largest.gather(1, counts[rows, None] - 1)
    return scaled.index_put((rows,), scaled[rows].masked_fill(scaled[rows] < threshold, -torch.inf))


def _keep_top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf what lies outside the smallest set of tokens whose probability reaches `top_p`; ties stay."""
    rows = torch.nonzero(top_p < 1).squeeze(1)
    if len(rows) == 0:
        return scaled
    threshold = _nucleus_threshold(scaled[rows], top_p[rows].double(), NUCLEUS_CANDIDATES)
    return scaled.index_put((rows,), scaled[rows].masked_fill(scaled[rows] < threshold, -torch.inf))


def _nucleus_threshold(scaled: Tensor, top_p: Tensor, num_candidates: int) -> Tensor:
    """Return `[num_rows, 1]`: the smallest value inside each row's nucleus."""
    num_candidates = min(num_candidates, scaled.shape[1])
    largest = scaled.topk(num_candidates, dim=-1).values
    total = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    reached = largest.exp().cumsum(dim=-1, dtype=torch.float64) / total
    short = (reached[:, -1] < top_p) & (num_candidates < scaled.shape[1])
    size = (reached < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(max=num_candidates - 1)
    threshold = largest.gather(1, size)
    if short.any():
        threshold[short] = _nucleus_threshold(scaled[short], top_p[short], scaled.shape[1])
    return threshold
