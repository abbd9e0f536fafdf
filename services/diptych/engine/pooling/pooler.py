"""Makes one vector of each prompt, as `Pooling` says, of the normed hidden states that a decoder returns.

Vectors are made in float32, but for the head's products, which are of the model's dtype. They are not normalised here:
a client may ask for its first dimensions only, and the length is taken of what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.architectures.pooling import Activation, Pooling
from diptych.common.arrays import I64
from diptych.engine.models.matrices.weights import Weights
from diptych.engine.values.batch import NO_TOKEN, ForwardBatch, StepResult

_ACTIVATIONS: Final[Mapping[Activation, Callable[[Tensor], Tensor]]] = {
    "": lambda x: x,
    "relu": F.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
}


class Pooler:
    """The pooling of a loaded model."""

    def __init__(self, pooling: Pooling, weights: Weights, norm_eps: float) -> None:
        self._pooling = pooling
        self._norm_eps = norm_eps
        self._head = [
            (dense, weights.matrix(f"head.{i}"), weights.vector(f"head.{i}_bias"), weights.vector(f"head.{i}_norm"))
            for i, dense in enumerate(pooling.head)
        ]

    def rows(self, batch: ForwardBatch) -> I64:
        """Return the tokens whose hidden states are needed, indices into `input_ids`."""
        return np.arange(len(batch.input_ids)) if self._pooling.needs_all_tokens else batch.sampled_tokens

    def result(self, hidden: Tensor, batch: ForwardBatch) -> StepResult:
        """Return the vectors of a step, float32 `[num_samples, size]`, of the states `[num_rows, hidden_size]`.

        A prompt whose vector has a NaN, or an infinite number, has `NO_TOKEN`; others have token 0.
        """
        vectors = self.vectors(hidden, batch).cpu()
        is_good = vectors.isfinite().all(dim=-1).numpy()
        return StepResult(np.where(is_good, 0, NO_TOKEN), vectors=list(vectors.numpy()))

    def vectors(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the same on the device, float32 `[num_samples, size]`."""
        return self._headed(self._pooled(hidden, batch)).float()

    def _pooled(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        match self._pooling.method:
            case "last":
                return hidden
            case "cls":
                starts = np.cumsum(batch.extend_lens) - batch.extend_lens
                return hidden[torch.from_numpy(starts).to(hidden.device)]
            case "mean":
                parts = torch.split(hidden.float(), batch.extend_lens.tolist())
                return torch.stack([part.mean(dim=0) for part in parts]).to(hidden.dtype)

    def _headed(self, x: Tensor) -> Tensor:
        for dense, matrix, bias, norm in self._head:
            out = x.new_empty(len(x), dense.rows)
            matrix.multiply(x.contiguous(), out)
            x = _ACTIVATIONS[dense.activation](out if bias is None else out + bias)
            x = x if norm is None else F.layer_norm(x, norm.shape, norm, eps=self._norm_eps)
        return x
