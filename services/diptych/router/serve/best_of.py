"""Chooses among the outputs that were made of one prompt: the most probable by token first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.router.output import Output


def choose_best(outputs: Sequence[Output], num_made: int, num_wanted: int) -> list[Output]:
    """Return the best `num_wanted` of each `num_made` consecutive outputs; all, and in their order, if all are wanted.

    Of several equally probable ones the earlier are better.
    """
    if num_made == num_wanted:
        return list(outputs)
    chosen: list[Output] = []
    for start in range(0, len(outputs), num_made):
        made = sorted(outputs[start : start + num_made], key=_mean_logprob, reverse=True)
        chosen += made[:num_wanted]
    return chosen


def _mean_logprob(output: Output) -> float:
    assert output.scores is not None, "outputs to choose among are scored"
    return sum(output.scores.logprobs.logprobs) / max(1, len(output.scores.logprobs))
