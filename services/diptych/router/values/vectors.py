"""What is made of the vectors that workers return: embeddings, probabilities of labels, and scores of pairs. Pure.

A worker's vector is as the model's head left it. Its first dimensions are taken before its length becomes 1
(Matryoshka representation learning, arXiv 2205.13147): so clients choose dimensions, and workers need not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diptych.common.errors import InvalidRequest

if TYPE_CHECKING:
    from diptych.architectures.pooling import Pooling
    from diptych.common.arrays import F32


class Pooled(NamedTuple):
    """The vector of a prompt."""

    vector: F32  # [size], as the model made it
    prompt_tokens: int
    cached_tokens: int = 0


def embedding(vector: F32, *, normalize: bool, dimensions: int | None = None) -> F32:
    """Return the first `dimensions` of a vector; None: all."""
    first = vector if dimensions is None else vector[:dimensions]
    return normalized(first) if normalize else first


def normalized(vector: F32) -> F32:
    """Return the vector with length 1; one of zeros stays."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / max(length, 1e-12)).astype(np.float32)


def check_dimensions(dimensions: int | None, size: int) -> None:
    if dimensions is not None and not 1 <= dimensions <= size:
        text = f"dimensions must be between 1 and {size}, which is what the model makes, not {dimensions}"
        raise InvalidRequest(text, param="dimensions")


def probabilities(scores: F32, pooling: Pooling) -> F32:
    """Return those of a classifier's labels: of one choice, or each by itself where there is one label, or several."""
    if len(scores) == 1 or pooling.several_labels:
        return (1 / (1 + np.exp(-scores.astype(np.float64)))).astype(np.float32)
    return softmax(scores)


def softmax(scores: F32) -> F32:
    shares = np.exp(scores.astype(np.float64) - scores.max())
    probabilities: F32 = (shares / shares.sum()).astype(np.float32)
    return probabilities


def likeness(one: F32, other: F32) -> float:
    """Return the cosine of two embeddings."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / max(lengths, 1e-12)
