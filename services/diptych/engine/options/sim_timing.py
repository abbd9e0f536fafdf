"""How long a step of a simulated model takes. Pure.

`h200` is Llama-3-8B in bfloat16 on one H200, as two workers that served had their steps (`bench/results/slo.md`): 4,096
prompt tokens take 99 ms, and a step of 64 requests with 4,096 tokens each 13.4 ms, of which 4.5 ms are for reading the
weights. A file that `diptych fit` wrote is another device with another model. `step=` is the constant of all steps;
`prompt-step=` behind it is that of steps with prompts, in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from diptych.common.errors import ConfigError
from diptych.engine.values.step_model import H200_LLAMA_8B, StepModel

NAMED: Final[Mapping[str, StepModel]] = {"none": StepModel(), "h200": H200_LLAMA_8B}
PARTS: Final[Mapping[str, str]] = {  # and the terms that they are, of a model
    "step": "step",
    "prompt": "prompt_token",
    "request": "row",
    "context": "context",
    "prompt-step": "prompt_step",
    "pair": "prompt_pair",
    "chunk": "prompt",
    "launch": "launch",
}


def read_timing(words: Sequence[str]) -> StepModel:
    """Return what `--sim-timing` says: a name or a file, parts as name=microseconds, or both. Raises `ConfigError`."""
    timing = NAMED["none"]
    for word in words:
        name, _, number = word.partition("=")
        if word in NAMED:
            timing = NAMED[word]
        elif name in PARTS:
            timing = timing.with_term(PARTS[name], _microseconds(number, word) / 1e6)
            if name == "step":
                timing = timing.with_term("prompt_step", timing.step)
        elif word.endswith(".json"):
            timing = _read_file(Path(word))
        else:
            raise ConfigError(
                f"--sim-timing takes {', '.join(NAMED)}, a file of `diptych fit` (FILE.json) or NAME=MICROSECONDS "
                f"({', '.join(PARTS)}), not {word!r}"
            )
    return timing


def _read_file(path: Path) -> StepModel:
    try:
        return StepModel.from_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"--sim-timing can't read {path}: {error.strerror}") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"--sim-timing takes a file of `diptych fit`; {path}: {error}") from None


def _microseconds(number: str, word: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f"--sim-timing takes microseconds, 0 or more, not {word!r}")
    return value
