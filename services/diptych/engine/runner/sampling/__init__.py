"""From the logits of a step to its tokens and their log-probabilities.

`sample_step` is what a runner calls; a `Sampler` does the arithmetic, by torch or by the C kernels.
"""

from __future__ import annotations

from diptych.engine.runner.sampling.sampler import Sampler, sample_step

__all__ = ["Sampler", "sample_step"]
