"""How long a step of a simulated model takes. Pure.

`h200` is Llama-3-8B in bfloat16 on one H200: 4,096 prompt tokens took 104 ms, and a step of 64 requests with 4,096
tokens each 12.9 ms, of which 4 ms are for reading the weights (`bench/results/gpu.md`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diptych.common.errors import ConfigError

if TYPE_CHECKING:
    from diptych.engine.values.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Timing:
    """In microseconds."""

    step: float = 0.0  # of each step, however small
    prompt: float = 0.0  # and for each token of a prompt that is computed
    request: float = 0.0  # and for each token of a request that continues
    context: float = 0.0  # and for each token of its context

    @property
    def prompt_tokens_per_s(self) -> float:
        return 1e6 / self.prompt if self.prompt else math.inf

    def step_s(self, batch: ForwardBatch) -> float:
        """Return how long `batch` takes."""
        row_lens, contexts = batch.extend_lens[batch.is_row], batch.seq_lens[batch.is_row]
        num_prompt_tokens = len(batch.input_ids) - int(row_lens.sum())
        decode_us = self.request * int(row_lens.sum()) + self.context * int((contexts * row_lens).sum())
        return (self.step + self.prompt * num_prompt_tokens + decode_us) / 1e6


NAMED: Final[Mapping[str, Timing]] = {
    "none": Timing(),
    "h200": Timing(step=4000.0, prompt=25.5, context=0.034),
}
_NAMES: Final = tuple(field.name for field in dataclasses.fields(Timing))


def read_timing(words: Sequence[str]) -> Timing:
    """Return what `--sim-timing` says: a name, parts as name=microseconds, or both. Raises `ConfigError`."""
    timing = NAMED["none"]
    for word in words:
        name, _, number = word.partition("=")
        if word in NAMED:
            timing = NAMED[word]
        elif name in _NAMES:
            timing = dataclasses.replace(timing, **{name: _microseconds(number, word)})
        else:
            raise ConfigError(f"--sim-timing takes {', '.join(NAMED)} or NAME=MICROSECONDS ({_listed()}), not {word!r}")
    return timing


def _listed() -> str:
    return ", ".join(_NAMES)


def _microseconds(number: str, word: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f"--sim-timing takes microseconds, 0 or more, not {word!r}")
    return value
