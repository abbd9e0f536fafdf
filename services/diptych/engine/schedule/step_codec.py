"""Steps and models of their time as workers tell them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.engine.values.step_model import StepModel, StepShape
from diptych.v1.worker_pb2 import StepModel as WireModel
from diptych.v1.worker_pb2 import StepRecords


def model_to_wire(model: StepModel) -> WireModel:
    evidence = model.evidence
    return WireModel(
        step=model.step,
        row=model.row,
        context=model.context,
        prompt_step=model.prompt_step,
        prompt_token=model.prompt_token,
        prompt_pair=model.prompt_pair,
        prompt=model.prompt,
        launch=model.launch,
        steps=evidence.num_steps,
        median_error=evidence.median_error,
        p90_error=evidence.p90_error,
        time_ratio=evidence.time_ratio,
        unidentified=evidence.unidentified,
        largest=evidence.largest,
    )


def shapes_and_seconds(records: StepRecords) -> Iterator[tuple[StepShape, float]]:
    """Yield steps that a worker told of. What its scheduler did before each is a part of the step's time.

    Workers that tell no contexts and no pairs are too old to learn from: then there is nothing.
    """
    columns = zip(
        records.output_tokens,
        records.context_tokens,
        records.prompt_tokens,
        records.prompt_pairs,
        records.prompts,
        records.host_s,
        records.duration_s,
        strict=False,
    )
    for rows, context, tokens, pairs, prompts, host_s, duration_s in columns:
        yield StepShape(rows, context, tokens if prompts else 0, pairs, prompts), host_s + duration_s
