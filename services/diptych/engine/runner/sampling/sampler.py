"""What a step gives back, from its logits. Log-probabilities are of the logits as the model gave them.

`sample_step` is what a runner calls; a `Sampler` does the arithmetic, by torch or by the C kernels. Before a token is
chosen, logits are changed as requests ask: bias, then penalties, then what the mask allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.common.arrays import F32, I32, I64
from diptych.engine.values.batch import Bias, Labels, Penalties, PromptRows, SamplingBatch, StepResult
from diptych.generation.logprobs import LogprobsBatch

Forbid = Callable[[Tensor, I32], None]


class Sampler(Protocol):
    """The arithmetic of sampling on one kind of processor. Logits are `[num_rows, vocab_size]`."""

    def choose(self, logits: Tensor, sampling: SamplingBatch) -> I64:
        """Return the next tokens; `NO_TOKEN` for a row that has a NaN, or whose largest logit is infinite.

        A row's token depends on its logits, its parameters, its seed and its position, never on the other rows or on
        the process that samples: one uniform number a row, hashed from (seed, position), is looked up in the cumulative
        distribution over token ids, so a replay elsewhere continues with the same tokens.
        """
        ...

    def logprobs(self, logits: Tensor, token_ids: I64, num_top: int) -> LogprobsBatch:
        """Return the log-probabilities of `token_ids` `[num_rows]`, and of the `num_top` likeliest tokens."""
        ...

    def forbid(self, logits: Tensor, token_mask: I32) -> None:
        """Set what the mask (see `SamplingBatch`) does not allow to minus infinity, in place; float32."""
        ...


def sample_step(
    sampler: Sampler, logits: Tensor, sampling: SamplingBatch, prompt_rows: PromptRows | None
) -> StepResult:
    """Return the result of a step. `logits`, of the samples and then of the prompt rows, may be overwritten."""
    num_samples = len(sampling.temperature)
    own = logits[:num_samples]
    of_labels = None if sampling.labels is None else label_logprobs(own, sampling.labels)  # before logits change
    token_ids = sampler.choose(adjust(own, sampling, sampler.forbid), sampling)
    return StepResult(
        token_ids,
        None if sampling.num_top is None else _logprobs(sampler, own, token_ids, sampling.num_top),
        None if prompt_rows is None else _prompt_logprobs(sampler, logits[num_samples:], prompt_rows),
        of_labels,
    )


def label_logprobs(logits: Tensor, labels: Labels) -> list[F32]:
    """Return the log-probabilities of each row's labels, float32; of a row without any: none."""
    lens = np.bincount(labels.rows, minlength=len(logits))
    return np.split(flat_label_logprobs(logits, labels).numpy(), np.cumsum(lens)[:-1])


def flat_label_logprobs(logits: Tensor, labels: Labels) -> Tensor:
    """Return the same on the device of the logits, row after row."""
    wanted, places = np.unique(labels.rows, return_inverse=True)  # other rows cost nothing
    rows, token_ids = _beside(logits, places), _beside(logits, labels.token_ids)
    own = logits[_beside(logits, wanted)].float()
    return own[rows, token_ids] - own.logsumexp(dim=-1)[rows]


def _prompt_logprobs(sampler: Sampler, logits: Tensor, rows: PromptRows) -> LogprobsBatch:
    return sampler.logprobs(logits, rows.target_ids, rows.num_top)


def _logprobs(sampler: Sampler, logits: Tensor, token_ids: I64, num_top: I64) -> LogprobsBatch:
    """Return those of the rows that want them (`num_top` >= 0) and have a token; the others' are 0."""
    wanted = np.flatnonzero((num_top >= 0) & (token_ids >= 0))
    width = int(num_top.max(initial=0))
    if len(wanted) == len(token_ids):
        return sampler.logprobs(logits, token_ids, width)
    found = sampler.logprobs(logits[torch.from_numpy(wanted)], token_ids[wanted], width)
    shape = (len(token_ids), width)
    batch = LogprobsBatch(np.zeros(shape[0], np.float32), np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    batch.logprobs[wanted], batch.top_ids[wanted] = found.logprobs, found.top_ids
    batch.top_logprobs[wanted] = found.top_logprobs
    return batch


def adjust(logits: Tensor, sampling: SamplingBatch, forbid: Forbid) -> Tensor:
    """Return the logits to choose from, `[num_samples, vocab_size]`.

    They are the given ones if nobody asks for a change; else float32, and changed in place unless log-probabilities,
    which are of the logits before, are wanted too.
    """
    if sampling.bias is None and sampling.penalties is None and sampling.token_mask is None and not sampling.processed:
        return logits
    changed = logits.to(torch.float32, copy=sampling.num_top is not None)
    if sampling.bias is not None:
        _add_bias(changed, sampling.bias)
    if sampling.penalties is not None:
        _penalise(changed, sampling.penalties)
    for row, change in sampling.processed:
        change(changed[row])
    if sampling.token_mask is not None:
        forbid(changed, sampling.token_mask)
    return changed


def _add_bias(logits: Tensor, bias: Bias) -> None:
    rows, token_ids, values = (_beside(logits, array) for array in (bias.rows, bias.token_ids, bias.values))
    logits.index_put_((rows, token_ids), values, accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    flat, at = logits.view(-1), _beside(logits, penalties.rows * logits.shape[1] + penalties.token_ids)
    repetition, seen = _beside(logits, penalties.repetition), flat.take(at)
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    flat.scatter_(0, at, seen - _beside(logits, penalties.subtract))


def _beside(logits: Tensor, array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(logits.device)
