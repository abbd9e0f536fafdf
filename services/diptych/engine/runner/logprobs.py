"""Computes log-probabilities of tokens from the logits that the model gave."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diptych.engine.batch import I64, LogprobsBatch


def token_logprobs(logits: Tensor, token_ids: I64, num_top: int) -> LogprobsBatch:
    """Return those of `token_ids` `[num_rows]`, and of the `num_top` likeliest tokens, for `[num_rows, vocab_size]`."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, torch.from_numpy(token_ids)[:, None]) - total
    top = logits.topk(num_top, dim=-1)
    return LogprobsBatch(chosen[:, 0].numpy(), top.indices.numpy(), (top.values - total).numpy())


def sampled_logprobs(logits: Tensor, token_ids: I64, num_top: I64) -> LogprobsBatch:
    """Return those of the rows that want them (`num_top` >= 0); the others' are 0."""
    rows = np.flatnonzero((num_top >= 0) & (token_ids >= 0))
    width = int(num_top.max(initial=0))
    found = token_logprobs(logits[torch.from_numpy(rows)], token_ids[rows], width)
    if len(rows) == len(token_ids):
        return found
    batch = LogprobsBatch(
        np.zeros(len(token_ids), np.float32),
        np.zeros((len(token_ids), width), np.int64),
        np.zeros((len(token_ids), width), np.float32),
    )
    batch.logprobs[rows] = found.logprobs
    batch.top_ids[rows] = found.top_ids
    batch.top_logprobs[rows] = found.top_logprobs
    return batch
