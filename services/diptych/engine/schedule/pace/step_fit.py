"""Learns from the steps of a scheduler how long steps take: the terms of a `StepModel`, none of them negative. Pure.

A step takes the longer of reading weights and of its prompts' products, which says something of the longer one alone.
So those with prompts that hardly took longer than the read, and were not to, tell nothing of products, and are left out
(alternating minimisation, as of max-affine regression): `step` follows from steps without prompts, and the terms of
prompts from those that were computed for longer.

A step counts by its relative error, so that one of 10 ms says as much as one of a second. What is kept of steps is a
Gram matrix for each of three kinds: steps with rows alone, with prompts alone, with both. A kind is forgotten only as
newer steps of it come: hours of decoding do not wash out what is known of prompts. Terms follow by non-negative least
squares from the sum of these matrices (the active set of Lawson and Hanson, on the matrix as Bro and de Jong have it);
where steps do not tell terms apart, they stay as they were. Steps that took far longer than others of their shape weigh
little (1/r^2, r in units of the usual error), and the first ones of a kind do not count: they compile, and fill caches.

Whether a step took only as long as its launch is not a matter of terms: `fit` guesses which have too few tokens for
more, learns the terms from the others, and keeps the guess that explains all steps best, if one is clearly better than
none. Workers, which learn as they go, do not.

Steps are learned by the block, so that one costs a few microseconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from diptych.engine.values.step_model import TERMS, Evidence, StepModel, StepShape

F64 = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BLOCK: Final = 256  # steps that are learned at once
FEWEST_STEPS: Final = 8  # that say something
WARM_UP: Final = 3  # steps of a kind that do not count
ROUNDS: Final = 1  # of weighing steps by what is known, and learning anew
FIRST_ROUNDS: Final = 8  # in a block with a kind of steps that was never seen
MOST_FITS: Final = 16  # to all steps there are, each from where the one before ended
SETTLED: Final = 1e-4  # of each term: further rounds change nothing
CLEAR: Final = 3.0  # usual errors, beyond which a step weighs less
SMALLEST_ERROR: Final = 0.005  # that counts as usual
RIDGE: Final = 1e-7  # by which terms keep to what they were; of a matrix whose diagonal is 1
TOLERANCE: Final = 1e-10
LEAST_S: Final = 1e-9  # of a step
COMPUTED: Final = 1.25  # times the read: beyond it a step with prompts took as long as their products
FEW_TOKENS: Final = (64, 128, 256, 512, 1024)  # of prompts: guesses of what takes no longer than launching
FEWEST_LAUNCHED: Final = 16  # steps that tell
PAYS: Final = 0.1  # of the error of steps with prompts: so much less makes up for a term more
WORST: Final = 0.5  # error of a step, that counts
KNOWN_SHARE: Final = 0.05  # of a step's time: a term is identified when its part is known so well (two deviations)

LINEAR: Final = TERMS[:-1]  # all but `launch`, which steps take or don't
_KINDS: Final = 3
_OF_KINDS: Final = np.array(
    [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]], float
)  # terms that a kind has


class StepFit:
    """Tell it of steps as they end."""

    def __init__(self, memory_steps: float, start: StepModel | None = None) -> None:
        """`memory_steps`: older ones of a kind count less than 1/e; infinite: all count alike.

        The error is measured on as many: the newest of all kinds.
        """
        self._memory_steps = memory_steps
        self._terms = np.zeros(len(LINEAR)) if start is None else np.array(start.terms[: len(LINEAR)])
        self._known = np.full(_KINDS, start is not None)  # kinds of which `_terms` says something
        self._grams = np.zeros((_KINDS, len(LINEAR), len(LINEAR)))
        self._moments = np.zeros((_KINDS, len(LINEAR)))
        self._weight = np.zeros(_KINDS)  # of the steps in them
        self._left_out = np.zeros(_KINDS, np.int64)  # steps that warmed up
        self._usual_error = SMALLEST_ERROR
        self._largest = np.zeros(len(LINEAR))
        self._num_steps = 0
        self._pending: list[tuple[StepShape, float]] = []
        num_blocks = math.ceil(memory_steps / BLOCK) if memory_steps < math.inf else None
        self._kept: deque[tuple[F64, F64]] = deque(maxlen=num_blocks)

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        self._pending.append((shape, seconds))
        if len(self._pending) >= BLOCK:
            self._learn_pending()

    def model(self) -> StepModel | None:
        """Return what is known now; None: too little."""
        if len(self._pending) >= FEWEST_STEPS:
            self._learn_pending()
        if not self._kept:
            return None
        return StepModel.of(self._terms.tolist(), self._evidence())

    def _learn_pending(self) -> None:
        columns, seconds, kinds = self._warm(*_as_arrays(self._pending))
        self._pending.clear()
        if not len(seconds):
            return
        is_known = self._known[kinds]
        expected = np.where(is_known, self._expected(columns), seconds)
        grams, moments, weight = self._grams, self._moments, self._weight
        for _ in range(ROUNDS if is_known.all() else FIRST_ROUNDS):
            weights, told = self._weights(seconds, expected), self._tells(columns, seconds)
            grams, moments, weight = self._with(columns[told], seconds[told], kinds[told], weights[told])
            self._terms = solved(grams.sum(axis=0), moments.sum(axis=0), self._terms)
            expected = self._expected(columns)
        self._grams, self._moments, self._weight = grams, moments, weight
        self._note(columns, seconds, kinds, expected)

    def _warm(self, columns: F64, seconds: F64, kinds: Kinds) -> tuple[F64, F64, Kinds]:
        """Return the steps that count."""
        counts = seconds > 0
        for kind in np.flatnonzero(self._left_out < WARM_UP):
            first = np.flatnonzero(kinds == kind)[: WARM_UP - self._left_out[kind]]
            counts[first] = False
            self._left_out[kind] += len(first)
        return columns[counts], seconds[counts], kinds[counts]

    def _expected(self, columns: F64) -> F64:
        read_s, of_rows, of_prompts = self._terms[0], self._terms[1:3], self._terms[3:]
        expected: F64 = columns[:, 1:3] @ of_rows + np.maximum(columns[:, 3:] @ of_prompts, read_s)
        return np.maximum(expected, LEAST_S)

    def _tells(self, columns: F64, seconds: F64) -> Bools:
        """Return which steps tell something of what they computed: all but those that only read weights for prompts."""
        took_s = seconds - columns[:, 1:3] @ self._terms[1:3]
        products_s = np.maximum(took_s / COMPUTED, columns[:, 3:] @ self._terms[3:])
        told: Bools = (columns[:, 0] > 0) | (products_s > self._terms[0])
        return told

    def _weights(self, seconds: F64, expected: F64) -> F64:
        """Return what each step weighs: by its expected time, and less if it took quite another one."""
        scale = np.clip(expected, seconds / 2, seconds * 2)
        errors = np.abs(seconds / expected - 1)
        usual = max(SMALLEST_ERROR, self._usual_error, 1.5 * float(np.median(errors)))
        weights: F64 = np.minimum(1.0, (CLEAR * usual / np.maximum(errors, 1e-12)) ** 2) / scale**2
        return weights

    def _with(self, columns: F64, seconds: F64, kinds: Kinds, weights: F64) -> tuple[F64, F64, F64]:
        """Return the matrices, moments and weights of the kinds with these steps, older ones forgotten for them."""
        kept = np.exp(-np.bincount(kinds, minlength=_KINDS) / self._memory_steps)
        grams, moments, weight = (
            self._grams * kept[:, None, None],
            self._moments * kept[:, None],
            self._weight * kept,
        )
        for kind in range(_KINDS):
            chosen = kinds == kind
            if chosen.any():
                weighed = columns[chosen] * weights[chosen, None]
                grams[kind] += weighed.T @ columns[chosen]
                moments[kind] += weighed.T @ seconds[chosen]
                weight[kind] += np.count_nonzero(chosen)
        return grams, moments, weight

    def _note(self, columns: F64, seconds: F64, kinds: Kinds, expected: F64) -> None:
        error = 1.5 * float(np.median(np.abs(seconds / expected - 1)))
        self._usual_error = max(SMALLEST_ERROR, (self._usual_error + error) / 2)
        self._known[kinds] = True
        self._num_steps += len(seconds)
        self._largest = np.maximum(self._largest, columns.max(axis=0))
        self._kept.append((columns, seconds))

    def _evidence(self) -> Evidence:
        columns = np.concatenate([each for each, _ in self._kept])
        measured = np.concatenate([each for _, each in self._kept])
        expected = self._expected(columns)
        errors = np.abs(expected / measured - 1)
        median, p90 = np.quantile(errors, (0.5, 0.9)).tolist()
        ratio = float(measured.sum() / expected.sum())
        return Evidence(self._num_steps, median, p90, ratio, self._unidentified(), tuple(self._largest.tolist()))

    def _unidentified(self) -> tuple[str, ...]:
        """Return the terms whose part of a step's time could be quite another by what was seen."""
        gram = self._grams.sum(axis=0)
        scaled, _ = _scaled(gram)
        spread = np.diag(np.linalg.inv(scaled + RIDGE * np.eye(len(LINEAR))))
        num_steps = np.maximum(self._weight @ _OF_KINDS, 1.0)
        parts = 2 * self._usual_error * np.sqrt(np.abs(spread) / num_steps)
        is_unknown = (np.diag(gram) <= 0) | (parts > KNOWN_SHARE)
        return tuple(name for name, unknown in zip(LINEAR, is_unknown, strict=True) if unknown)


def fit(steps: Iterable[tuple[StepShape, float]]) -> StepModel | None:
    """Return the model of steps and their seconds, in the order in which they ran; None: they are too few."""
    told = list(steps)
    best = _settled(told)
    if best is None or (error := _error(best, told)) < SMALLEST_ERROR:
        return best
    least = (1 - PAYS) * error
    for few in FEW_TOKENS:
        launches = sorted(took_s for shape, took_s in told if 0 < shape.prompt_tokens < few)
        larger = _settled([step for step in told if not 0 < step[0].prompt_tokens < few])
        if larger is not None and len(launches) >= FEWEST_LAUNCHED:
            launched = _launched(larger, told, launches[len(launches) // 2])
            error = _error(launched, told)
            best, least = (launched, error) if error < least else (best, least)
    return best


def _launched(model: StepModel, steps: list[tuple[StepShape, float]], launch_s: float) -> StepModel:
    """Return a model that knows launching: it takes as long as steps that should take no longer, in the median."""
    shorter = [took_s for shape, took_s in steps if shape.prompt_tokens and model.seconds(shape) < launch_s]
    launched = model.with_term("launch", float(np.median(shorter)) if shorter else launch_s)
    return replace(launched, evidence=_evidence(launched, steps))


def _evidence(model: StepModel, steps: list[tuple[StepShape, float]]) -> Evidence:
    """Return what a model rests on, of which the steps that only launch are a part."""
    expected, seconds = _both(model, steps)
    median, p90 = np.quantile(np.abs(expected / seconds - 1), (0.5, 0.9)).tolist()
    ratio = float(seconds.sum() / expected.sum())
    return model.evidence._replace(num_steps=len(seconds), median_error=median, p90_error=p90, time_ratio=ratio)


def _error(model: StepModel, steps: list[tuple[StepShape, float]]) -> float:
    """Return the mean relative error of a model, of which steps that stalled are a small part."""
    expected, seconds = _both(model, [step for step in steps if step[0].prompt_tokens])
    return float(np.minimum(np.abs(expected / seconds - 1), WORST).mean()) if len(seconds) else 0.0


def _both(model: StepModel, steps: list[tuple[StepShape, float]]) -> tuple[F64, F64]:
    counted = [(max(LEAST_S, model.seconds(shape)), took_s) for shape, took_s in steps if took_s > 0]
    both: F64 = np.array(counted, np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _settled(steps: list[tuple[StepShape, float]]) -> StepModel | None:
    """Return the model without a launch."""
    found = _learned(steps, None)
    for _ in range(MOST_FITS):
        if found is None:
            break
        before, found = found, _learned(steps, found)
        if found is not None and np.allclose(found.terms, before.terms, rtol=SETTLED, atol=0.0):
            break
    return found


def _learned(steps: list[tuple[StepShape, float]], start: StepModel | None) -> StepModel | None:
    """Learn all steps at once, beginning with a model."""
    learner = StepFit(math.inf, start)
    for shape, seconds in steps:
        learner.learn(shape, seconds)
    return learner.model()


def solved(gram: F64, moment: F64, start: F64) -> F64:
    """Return the non-negative terms with the least squared error, near `start` where others do as well."""
    scaled, scale = _scaled(gram)
    scaled += RIDGE * np.eye(len(scale))
    target = moment / scale + RIDGE * start * scale
    passive = start > 0
    found = _restricted(scaled, target, passive)
    if found.min() < 0 or not passive.any():
        passive, found = np.zeros(len(scale), bool), np.zeros(len(scale))
    for _ in range(3 * len(scale)):
        slope = np.where(passive, -math.inf, target - scaled @ found)
        if slope.max() <= TOLERANCE * (1 + np.abs(target).max()):
            break
        passive[slope.argmax()] = True
        found, passive = _feasible(scaled, target, found, passive)
    return np.maximum(found, 0.0) / scale


def _feasible(scaled: F64, target: F64, found: F64, passive: Bools) -> tuple[F64, Bools]:
    """Go towards the solution in the passive terms; those that would become negative on the way stay 0."""
    while (wanted := _restricted(scaled, target, passive)).min() < 0:
        falling = passive & (wanted < 0)
        way = np.min(found[falling] / (found[falling] - wanted[falling]))
        found = found + way * (wanted - found)
        passive = passive & (found > TOLERANCE * found.max())
        found = np.where(passive, found, 0.0)
    return wanted, passive


def _restricted(scaled: F64, target: F64, passive: Bools) -> F64:
    """Return the solution in the passive terms; the others are 0."""
    solution = np.zeros(len(target))
    chosen = np.flatnonzero(passive)
    solution[chosen] = np.linalg.solve(scaled[np.ix_(chosen, chosen)], target[chosen])
    return solution


def _scaled(gram: F64) -> tuple[F64, F64]:
    """Return the matrix with 1 in its diagonal where it has something, and the scale of each term."""
    scale = np.sqrt(np.diag(gram))
    scale = np.where(scale > 0, scale, 1.0)
    return gram / np.outer(scale, scale), scale


def _as_arrays(steps: list[tuple[StepShape, float]]) -> tuple[F64, F64, Kinds]:
    """Return what each term is multiplied by, `[num_steps, num_terms]`; the seconds; and the kinds."""
    shapes = np.array([shape for shape, _ in steps], float).reshape(-1, len(StepShape._fields))
    seconds = np.array([took_s for _, took_s in steps], float)
    has_rows, has_prompts = shapes[:, 0] > 0, shapes[:, 2] > 0
    columns = np.empty((len(steps), len(LINEAR)))
    columns[:, 0] = ~has_prompts
    columns[:, 1:3] = shapes[:, 0:2]
    columns[:, 3] = has_prompts
    columns[:, 4:7] = shapes[:, 2:5]
    kinds = np.where(has_prompts, 1 + has_rows, 0)
    return columns, seconds, kinds
