from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.engine.schedule.pace.step_fit import LINEAR, StepFit, fit, solved
from diptych.engine.values.step_model import StepModel, StepShape

CPU = StepModel(8e-3, 1.5e-3, 2e-6, 9e-3, 4e-4, 3e-8, 5e-4)
GPU = StepModel(4.48e-3, 0.0, 34e-9, 3.47e-3, 20.85e-6, 1.23e-9, 0.0)
READS = StepModel(20e-3, 2e-5, 1e-7, 1e-3, 20e-6, 1e-9, 2e-3)  # 850 tokens of a prompt take no longer than the weights
MAGNITUDES = (1e-2, 1e-3, 1e-6, 1e-3, 1e-4, 1e-8, 1e-3)

Steps = list[tuple[StepShape, float]]


def shapes(count: int, seed: int) -> list[StepShape]:
    """Steps as a worker has them: half decode, a quarter prompts, a quarter both."""
    rng = np.random.default_rng(seed)
    found = []
    for kind in rng.integers(4, size=count):
        rows = int(rng.integers(1, 33)) if kind != 2 else 0
        context = int(rows * rng.integers(10, 3000))
        prompts = int(rng.integers(1, 5)) if kind >= 2 else 0
        tokens = int(rng.integers(prompts, 1024)) if prompts else 0
        found.append(StepShape(rows, context, tokens, tokens * float(rng.integers(1, 4000)), prompts))
    return found


def measured(model: StepModel, of: list[StepShape], noise: float = 0.0, outliers: float = 0.0) -> Steps:
    """Steps with normal noise; outliers take three to twenty times as long."""
    rng = np.random.default_rng(5)
    slow = np.where(rng.random(len(of)) < outliers, rng.uniform(3, 20, len(of)), 1.0)
    factors = slow * np.maximum(0.1, 1 + noise * rng.standard_normal(len(of)))
    return [(shape, model.seconds(shape) * factor) for shape, factor in zip(of, factors.tolist(), strict=True)]


def errors(found: StepModel, model: StepModel, of: list[StepShape]) -> list[float]:
    return [abs(found.seconds(shape) / model.seconds(shape) - 1) for shape in of]


def learned(steps: Steps, memory_steps: float = math.inf) -> StepModel:
    learner = StepFit(memory_steps)
    for shape, seconds in steps:
        learner.learn(shape, seconds)
    found = learner.model()
    assert found is not None
    return found


@settings(max_examples=12, deadline=None)
@given(st.tuples(*(st.sampled_from([0.0, 0.3, 1.0, 4.0]) for _ in LINEAR)), st.integers(0, 2**32))
@example((4.0, 0.0, 0.0, 0.0, 0.3, 0.3, 0.0), 26662)  # settles in the eighth fit
@example((4.0, 0.3, 4.0, 1.0, 0.0, 1.0, 1.0), 316456682)  # 6 % off for two steps
def test_terms_are_found_again(factors: tuple[float, ...], seed: int) -> None:
    """What the read hides is no convex problem: of 1,500 cases 2 ended beside the best, 6 % off for 1 step in 200."""
    terms = [factor * size for factor, size in zip(factors, MAGNITUDES, strict=True)]
    model = StepModel.of(terms)
    of = [shape for shape in shapes(400, seed) if model.seconds(shape) > 0]
    if len(of) < 2 * len(LINEAR) + 10:
        return
    sums = model.with_term("prompt_step", model.step + model.prompt_step)  # nothing is hidden
    found = learned(measured(sums, of))
    assert max(errors(found, sums, of)) < 1e-3
    assert min(found.terms) >= 0
    roof = fit(measured(model, of))
    assert roof is not None
    assert np.quantile(errors(roof, model, of), 0.99) < 1e-3
    assert max(errors(roof, model, of)) < 0.1


def test_a_fit_goes_on_until_it_has_settled() -> None:
    model = StepModel.of([factor * size for factor, size in zip((4, 0, 0, 0, 0.3, 0.3, 0), MAGNITUDES, strict=True)])
    of = [shape for shape in shapes(400, 26662) if model.seconds(shape) > 0]
    found = fit(measured(model, of))
    assert found is not None
    assert max(errors(found, model, of)) < 1e-6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_no_term_is_negative_whatever_is_measured(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [(shape, float(rng.exponential(0.1))) for shape in shapes(200, seed)]
    assert min(learned(steps).terms) >= 0


@pytest.mark.parametrize("world", [GPU, READS])
@pytest.mark.parametrize("memory_steps", [math.inf, 512.0])
def test_what_is_hidden_behind_reading_weights_is_told_apart(world: StepModel, memory_steps: float) -> None:
    of = shapes(2000, 7)
    found = learned(measured(world, of, noise=0.02), memory_steps)
    assert max(errors(found, world, of)) < 0.02
    assert found.step == pytest.approx(world.step, rel=0.01)
    assert found.prompt_token == pytest.approx(world.prompt_token, rel=0.05)
    assert found.prompt_pair == pytest.approx(world.prompt_pair, rel=0.1)


@pytest.mark.parametrize("launch_s", [0.0055, 0.0102, 0.013])
def test_what_launching_takes_is_told_apart_from_products(launch_s: float) -> None:
    of = [
        shape._replace(prompt_tokens=-(-shape.prompt_tokens // (1 + i % 16))) for i, shape in enumerate(shapes(2000, 7))
    ]
    world = GPU.with_term("launch", launch_s)
    found = fit(measured(world, of, noise=0.03))
    assert found is not None
    assert found.launch == pytest.approx(launch_s, rel=0.05)
    assert found.prompt_token == pytest.approx(GPU.prompt_token, rel=0.08)
    assert np.median(errors(found, world, of)) < 0.02
    assert max(errors(found, world, of)) < 0.12


@pytest.mark.parametrize("world", [CPU, GPU, READS])
def test_where_launching_takes_no_longer_nothing_is_made_of_it(world: StepModel) -> None:
    found = fit(measured(world, shapes(2000, 7), noise=0.03))
    assert found is not None
    assert found.launch == 0.0


def test_steps_that_only_read_weights_do_not_wash_out_what_is_known_of_products() -> None:
    few = [StepShape(4, 4000, 1 + i % 60, 1e4, 1) for i in range(4096)]
    assert max(errors(READS.with_term("prompt_token", 0.0), READS, few)) == 0.0  # nothing of products shows in them
    found = learned([*measured(READS, shapes(1000, 3), 0.02), *measured(READS, few, 0.02)], memory_steps=256)
    assert max(errors(found, READS, [*shapes(1000, 3), *few])) < 0.03


def test_prompts_that_are_always_hidden_cost_what_the_read_does_and_are_not_identified() -> None:
    few = [StepShape(2, 2000 + i, i % 2 * 40, i % 2 * 1e4, i % 2) for i in range(1000)]
    found = learned(measured(READS, few, noise=0.02, outliers=0.05))
    assert max(errors(found, READS, few)) < 0.02
    assert set(found.evidence.unidentified) >= {"prompt_step", "prompt_token", "prompt_pair", "prompt"}


@pytest.mark.parametrize("seed", range(3))
def test_one_step_in_twenty_that_takes_far_longer_changes_little(seed: int) -> None:
    of = shapes(1500, seed)
    found = fit(measured(CPU, of, noise=0.05, outliers=0.05))
    assert found is not None
    assert np.median(errors(found, CPU, of)) < 0.01
    assert max(errors(found, CPU, of)) < 0.05
    assert found.evidence.unidentified == ()
    assert found.evidence.time_ratio > 1.2  # what they cost is told


def test_the_error_that_is_told_is_that_of_the_steps() -> None:
    found = fit(measured(CPU, shapes(3000, 1), noise=0.1))
    assert found is not None
    assert found.evidence.median_error == pytest.approx(0.1 * 0.674, rel=0.1)
    assert found.evidence.p90_error == pytest.approx(0.1 * 1.645, rel=0.15)
    assert found.evidence.time_ratio == pytest.approx(1.0, abs=0.02)


def test_terms_that_steps_do_not_tell_are_named() -> None:
    decode = [StepShape(8, 8 * (100 + i), 0, 0.0, 0) for i in range(300)]
    found = learned(measured(CPU, decode, noise=0.02))
    assert set(found.evidence.unidentified) == {"step", "row", "prompt_step", "prompt_token", "prompt_pair", "prompt"}
    assert max(errors(found, CPU, decode)) < 0.02
    assert found.evidence.largest == (1.0, 8.0, 8 * 399.0, 0.0, 0.0, 0.0, 0.0)


def test_what_is_known_of_prompts_outlives_hours_of_decoding() -> None:
    of = shapes(1000, 3)
    decode = [shape for shape in shapes(8000, 4) if not shape.prompt_tokens]
    found = learned([*measured(CPU, of, noise=0.02), *measured(CPU, decode, noise=0.02)], memory_steps=256)
    assert max(errors(found, CPU, of)) < 0.02
    assert found.evidence.unidentified == ()


def test_a_device_that_becomes_slower_is_believed_soon() -> None:
    of = shapes(2000, 6)
    slower = StepModel.of(1.7 * term for term in CPU.terms)
    found = learned([*measured(CPU, of, noise=0.02), *measured(slower, of, noise=0.02)], memory_steps=128)
    assert np.median(errors(found, slower, of)) < 0.03


def test_first_steps_do_not_count_and_few_say_nothing() -> None:
    learner = StepFit(math.inf)
    shape = StepShape(1, 10, 0, 0.0, 0)
    for _ in range(3):
        learner.learn(shape, 60.0)  # it compiles
    assert learner.model() is None
    for _ in range(20):
        learner.learn(shape, 0.01)
    found = learner.model()
    assert found is not None
    assert found.seconds(shape) == pytest.approx(0.01)
    assert found.evidence.num_steps == 20
    assert found.evidence.p90_error == pytest.approx(0.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_no_other_terms_have_a_smaller_error(seed: int, size: int) -> None:
    """The conditions of Karush, Kuhn and Tucker."""
    rng = np.random.default_rng(seed)
    columns = rng.random((20, size)) * 10.0 ** rng.integers(-3, 4, size)
    target = columns @ rng.normal(size=size) + rng.normal(size=20)
    gram, moment = columns.T @ columns, columns.T @ target
    found = solved(gram, moment, np.zeros(size))
    slope = (moment - gram @ found) / np.sqrt(np.diag(gram))
    assert found.min() >= 0
    small = 1e-5 * np.abs(moment / np.sqrt(np.diag(gram))).max()
    assert slope.max() < small
    assert np.abs(slope[found > 0]).max(initial=0) < small
