"""`Sampler` by torch: any dtype, any device.

Order, as in transformers: temperature, then top-k, then top-p of what is left, then min-p.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.common.arrays import I32, I64
from diptych.engine.runner.sampling.uniforms import uniforms
from diptych.engine.values.batch import NO_TOKEN, SamplingBatch
from diptych.generation.logprobs import LogprobsBatch

NUCLEUS_CANDIDATES = 1024  # top-p sorts so many tokens first,
CANDIDATES_GROWTH = 8  # and so many times more where their probability does not suffice
BLOCK = 256  # tokens


class TorchSampler:
    """Works on whole batches; rows that are drawn from are computed in float32."""

    def choose(self, logits: Tensor, sampling: SamplingBatch) -> I64:
        largest = logits.max(dim=-1)  # NaN counts as the largest
        tokens: I64 = largest.indices.masked_fill_(~largest.values.isfinite(), NO_TOKEN).numpy()
        random = np.flatnonzero((sampling.temperature > 0) & (tokens != NO_TOKEN))
        if len(random):
            tokens[random] = _draw(logits[torch.from_numpy(random)].float(), _select(sampling, random))
        return tokens

    def logprobs(self, logits: Tensor, token_ids: I64, num_top: int) -> LogprobsBatch:
        logits = logits.float()
        total = logits.logsumexp(dim=-1, keepdim=True)
        chosen = logits.gather(1, torch.from_numpy(token_ids)[:, None]) - total
        top = logits.topk(num_top, dim=-1)
        return LogprobsBatch(chosen[:, 0].numpy(), top.indices.numpy(), (top.values - total).numpy())

    def forbid(self, logits: Tensor, token_mask: I32) -> None:
        bits = np.unpackbits(token_mask.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)


def _select(sampling: SamplingBatch, rows: I64) -> SamplingBatch:
    return SamplingBatch(
        temperature=sampling.temperature[rows],
        top_p=sampling.top_p[rows],
        top_k=sampling.top_k[rows],
        seeds=sampling.seeds[rows],
        positions=sampling.positions[rows],
        min_p=None if sampling.min_p is None else sampling.min_p[rows],
    )


def _draw(logits: Tensor, sampling: SamplingBatch) -> I64:
    temperature = torch.from_numpy(sampling.temperature)[:, None]
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp_()
    weights = _keep_top_k(weights, torch.from_numpy(sampling.top_k))
    weights = _keep_top_p(weights, torch.from_numpy(sampling.top_p))
    if sampling.min_p is not None:  # the likeliest token's weight is 1
        weights = weights.masked_fill(weights < torch.from_numpy(sampling.min_p)[:, None], 0.0)
    drawn: I64 = _inverse_cdf(weights, torch.from_numpy(uniforms(sampling.seeds, sampling.positions))).numpy()
    return drawn


def _keep_top_k(weights: Tensor, top_k: Tensor) -> Tensor:
    """Set all but each row's `top_k` largest to 0; ties with the smallest of them stay."""
    vocab_size = weights.shape[1]
    rows = torch.nonzero((top_k > 0) & (top_k < vocab_size)).squeeze(1)
    if len(rows) == 0:
        return weights
    largest = weights[rows].topk(int(top_k[rows].max()), dim=-1).values
    return _at_least(weights, rows, largest.gather(1, top_k[rows, None] - 1))


def _keep_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Set to 0 what lies outside the smallest set of tokens whose probability reaches `top_p`; ties stay."""
    rows = torch.nonzero(top_p < 1).squeeze(1)
    if len(rows) == 0:
        return weights
    wanted = weights[rows].sum(dim=-1, dtype=torch.float64) * top_p[rows]
    return _at_least(weights, rows, _nucleus_threshold(weights[rows], wanted, NUCLEUS_CANDIDATES))


def _at_least(weights: Tensor, rows: Tensor, threshold: Tensor) -> Tensor:
    chosen = weights[rows]
    return weights.index_put((rows,), chosen.masked_fill(chosen < threshold, 0.0))


def _nucleus_threshold(weights: Tensor, wanted: Tensor, num_candidates: int) -> Tensor:
    """Return `[num_rows, 1]`: the smallest of the largest weights of each row that together reach `wanted`."""
    num_candidates = min(num_candidates, weights.shape[1])
    largest = weights.topk(num_candidates, dim=-1).values
    reached = largest.cumsum(dim=-1, dtype=torch.float64)
    size = (reached < wanted[:, None]).sum(dim=-1, keepdim=True)
    threshold = largest.gather(1, size.clamp(max=num_candidates - 1))
    short = (size.squeeze(1) == num_candidates) & (num_candidates < weights.shape[1])
    if short.any():
        threshold[short] = _nucleus_threshold(weights[short], wanted[short], num_candidates * CANDIDATES_GROWTH)
    return threshold


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return `[num_rows]`: the token where the cumulative weight passes `uniform` of the total.

    Two steps, first among blocks of tokens: a running sum over the whole vocabulary is slow.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    running = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * running[:, -1:]
    block = _first_above(running, target)
    before = running.gather(1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    inside = blocks[torch.arange(len(blocks)), block[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    return (block * BLOCK + _first_above(inside, target - before))[:, 0]


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """Return `[num_rows, 1]`: where a running sum first exceeds `target`, and never an entry that adds nothing.

    Rounding may put the target at the very end; the last entry that adds something is meant then.
    """
    end = running[:, -1:]
    return torch.searchsorted(running, torch.minimum(target, end.nextafter(torch.zeros_like(end))), right=True)
