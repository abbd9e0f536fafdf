"""How long a step takes, by what it computes: a roofline, of terms that are linear in the step's shape. Pure.

A step reads all weights, and computes products of prompts meanwhile, so it takes the longer of the two (Williams et al.
2009): `step` stands for the read and for launching, the `prompt` terms for products. Attention compares each token of a
prompt with all tokens before it, which `prompt_pair` counts. Requests that decode add `row` and `context`. The kernels
of a step with prompts are launched one by one, which takes the host `launch`: no such step is shorter. A file holds a
model of one checkpoint on one device: `diptych fit` writes it, simulations and planners read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np

from diptych.common.errors import ConfigError
from diptych.engine.values.batch import ForwardBatch, ForwardMode

FORMAT: Final = "diptych step model 2"
SUMS_FORMAT: Final = "diptych step model 1"  # in which `prompt_step` was beside `step`, and nothing was hidden
SPEED_TOKENS: Final = 2048  # of the prompt whose speed counts as that of prompts


class StepShape(NamedTuple):
    """What the time of a step depends on."""

    num_rows: int  # requests that get one more token; each draft of theirs counts as one more
    context_tokens: int  # the sum of their contexts
    prompt_tokens: int  # that are computed
    prompt_pairs: float  # of a token of a prompt and one before it: the sum over chunks of (end^2 - first^2) / 2
    num_prompts: int  # chunks

    @staticmethod
    def of(batch: ForwardBatch) -> StepShape:
        """Return the shape of a step. A prompt whose only token is computed counts as a row: so it is computed."""
        lens, new = batch.seq_lens, batch.extend_lens
        if batch.mode is ForwardMode.DECODE:
            num_tokens = len(batch.input_ids)
            return StepShape(num_tokens, int(lens.sum() if num_tokens == len(lens) else lens @ new), 0, 0.0, 0)
        context_tokens = int(lens @ new)
        prompt_tokens, doubled_pairs = 0, 0
        chunks = np.flatnonzero(new > np.maximum(batch.num_sampled, 1))  # no rows; few: a loop is faster than arrays
        for end, num_tokens in zip(lens[chunks].tolist(), new[chunks].tolist(), strict=True):
            context_tokens -= end * num_tokens
            prompt_tokens += num_tokens
            doubled_pairs += num_tokens * (2 * end - num_tokens)
        num_rows = int(new.sum()) - prompt_tokens
        return StepShape(num_rows, context_tokens, prompt_tokens, doubled_pairs / 2, len(chunks))


class Evidence(NamedTuple):
    """What a model was fitted to."""

    num_steps: int = 0
    median_error: float = 0.0  # of |predicted - measured| / measured, over the newest of those steps
    p90_error: float = 0.0
    time_ratio: float = 1.0  # all time that these took, over what is predicted: above 1 by what outliers cost
    unidentified: tuple[str, ...] = ()  # terms that the steps did not tell: their values are no measurement
    largest: tuple[float, ...] = ()  # in a step, of what each term is multiplied by: beyond it nothing was seen


NO_EVIDENCE: Final = Evidence()


@dataclass(frozen=True, slots=True)
class StepModel:
    """The seconds of a step, term by term; and whose they are."""

    step: float = 0.0  # of a step without prompts, and of any step at least
    row: float = 0.0  # and for each row
    context: float = 0.0  # and for each token of the rows' contexts
    prompt_step: float = 0.0  # of a step with prompts, in place of `step`
    prompt_token: float = 0.0  # and for each token of a prompt
    prompt_pair: float = 0.0  # and for each pair of such a token and one before it
    prompt: float = 0.0  # and for each chunk of a prompt
    launch: float = 0.0  # of a step with prompts at least, whatever it computes
    model: str = ""
    device: str = ""
    kv_dtype: str = ""
    tp: int = 1
    evidence: Evidence = NO_EVIDENCE
    pp: int = 1

    def seconds(self, shape: StepShape) -> float:
        """Return how long a step takes."""
        rows_s = self.row * shape.num_rows + self.context * shape.context_tokens
        if not shape.prompt_tokens:
            return rows_s + self.step
        return max(self.launch, rows_s + max(self.step, self.prompt_step + self.work_s(shape)))

    def work_s(self, shape: StepShape) -> float:
        """Return how long the prompts of a step are computed, beside the constant of such a step."""
        tokens_s = self.prompt_token * shape.prompt_tokens
        return tokens_s + self.prompt_pair * shape.prompt_pairs + self.prompt * shape.num_prompts

    @property
    def terms(self) -> tuple[float, ...]:
        """Return the seconds of all terms, in the order of `TERMS`."""
        return tuple(getattr(self, name) for name in TERMS)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Return how fast a long prompt is computed beside the constant of a step; infinite where it costs nothing."""
        num_tokens = SPEED_TOKENS
        took_s = self.work_s(StepShape(0, 0, num_tokens, num_tokens**2 / 2, 1))
        return num_tokens / took_s if took_s > 0 else math.inf

    @staticmethod
    def of(terms: Iterable[float], evidence: Evidence = NO_EVIDENCE) -> StepModel:
        """Return the model with these terms, in the order of `TERMS`; the last ones may lack, and are 0."""
        found: dict[str, Any] = dict(zip(TERMS, terms, strict=False))
        return StepModel(**found, evidence=evidence)

    def with_term(self, name: str, seconds: float) -> StepModel:
        """Return the model with one term, of `TERMS`, changed."""
        changed: Any = {name: seconds}
        return replace(self, **changed)

    @property
    def with_stalls(self) -> StepModel:
        """Return the model whose steps take as long, all together, as those did that it was fitted to.

        Steps that stall weigh little in the terms: a single step is told best without them, and a whole output with.
        """
        ratio = self.evidence.time_ratio or 1.0
        slower: Any = {name: ratio * getattr(self, name) for name in TERMS}
        return replace(self, **slower, evidence=self.evidence._replace(time_ratio=1.0))

    def to_json(self) -> str:
        """Return the text of a model's file."""
        whose = {name: getattr(self, name) for name in _WHOSE}
        terms = dict(zip(TERMS, self.terms, strict=True))
        return json.dumps({"format": FORMAT, **whose, "seconds": terms, **self.evidence._asdict()}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> StepModel:
        """Return the model in a file's text. Raises `ConfigError` that says what to change."""
        held = _object(text)
        if held.get("format") not in (FORMAT, SUMS_FORMAT):
            raise ConfigError(f'a step model has "format": "{FORMAT}", not {held.get("format")!r}')
        terms = held.get("seconds")
        if not isinstance(terms, dict) or set(terms) - set(TERMS):
            raise ConfigError(f'a step model has "seconds": an object with {", ".join(TERMS)}, not {terms!r}')
        found = StepModel.of((_number(name, terms.get(name, 0.0)) for name in TERMS), _evidence(held))
        if held["format"] == SUMS_FORMAT:
            found = found.with_term("prompt_step", found.step + found.prompt_step)
        return replace(
            found,
            model=_word("model", held),
            device=_word("device", held),
            kv_dtype=_word("kv_dtype", held),
            tp=_whole("tp", held.get("tp", 1)),
            pp=_whole("pp", held.get("pp", 1)),
        )


_WHOSE: Final = ("model", "device", "kv_dtype", "tp", "pp")
TERMS: Final = tuple(each.name for each in fields(StepModel) if each.name not in (*_WHOSE, "evidence"))

H200_LLAMA_8B: Final = StepModel(  # of the steps of two workers that served: `bench/results/slo.md`
    *(4.48e-3, 0.0, 0.0339e-6, 3.47e-3, 20.85e-6, 1.227e-9, 0.0, 10.2e-3), "Llama-3-8B", "H200", "bfloat16"
)


def _object(text: str) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a step model is JSON, as `diptych fit` writes it: {error}") from None
    if not isinstance(held, dict):
        raise ConfigError("a step model is a JSON object, as `diptych fit` writes it")
    return held


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _number(name: str, value: Any) -> float:
    if not _is_number(value):
        raise ConfigError(f'"{name}" of a step model is a number, 0 or more, not {value!r}')
    return float(value)


def _word(name: str, held: dict[str, Any]) -> str:
    value = held.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f'"{name}" of a step model is a text, not {value!r}')
    return value


def _whole(name: str, value: Any) -> int:
    if not _is_number(value) or value != int(value):
        raise ConfigError(f'"{name}" of a step model is a whole number, not {value!r}')
    return int(value)


def _evidence(held: dict[str, Any]) -> Evidence:
    unidentified = held.get("unidentified", [])
    if not isinstance(unidentified, list) or not set(map(str, unidentified)) <= set(TERMS):
        raise ConfigError(f'"unidentified" of a step model lists terms ({", ".join(TERMS)}), not {unidentified!r}')
    largest = held.get("largest", [])
    if not isinstance(largest, list) or not all(map(_is_number, largest)):
        raise ConfigError(f'"largest" of a step model lists numbers, not {largest!r}')
    return Evidence(
        num_steps=_whole("num_steps", held.get("num_steps", 0)),
        median_error=_number("median_error", held.get("median_error", 0.0)),
        p90_error=_number("p90_error", held.get("p90_error", 0.0)),
        time_ratio=_number("time_ratio", held.get("time_ratio", 1.0)),
        unidentified=tuple(unidentified),
        largest=tuple(map(float, largest)),
    )
