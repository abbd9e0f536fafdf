"""What no platform can exceed: calls as a fluid that workers are divided among, with hindsight and at no loss. Pure.

The bound is a linear program. A call, or a part of it, needs `work` seconds of a worker between its arrival and its
deadline, and workers do so many seconds of work a second: maximise the sum of the parts of calls that are done. What
sets of calls can be done is a polymatroid, for which a greedy choice is exact (Edmonds 1970): calls with the least work
first, each as far as all intervals of time that hold its own have time left (Hall's condition for intervals). A call
that one worker can't do in its time is not done by several either.

Whatever is unknown is left out to the platform's favour. What a call needs is the least that any division, order and
batch could have it need: prompts find all that any earlier call began with, the constant of a step is shared by as
many requests as can run, and time is cut into bins that count whole. Weights are read while prompts are computed, so
either the prompts' products count or the reads for outputs: each bounds, and the tighter bound holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from diptych.common.arrays import F64, I64
from diptych.generation.slo import Slo
from diptych.simulator.setup import WorkerSetup
from diptych.simulator.traces.call import BLOCK_TOKENS, Call

NUM_BINS: Final = 128


class Fluid(NamedTuple):
    """What bounds a platform that is offered calls."""

    most_good: float  # calls that can keep their SLO
    least_gpu_hours: float  # that all calls take together


def fluid(calls: Sequence[Call], slos: Sequence[Slo], worker: WorkerSetup, num_workers: int) -> Fluid:
    """Bound what becomes of calls, each with its SLO, on at most so many workers that are alike."""
    prompt_s, read_s, output_s = work(calls, worker)
    arrival_s = np.array([call.arrival_s for call in calls])
    ttft_s, tpot_s = (np.array([getattr(slo, name) or np.inf for slo in slos]) for name in ("ttft_s", "tpot_s"))
    gaps = np.array([call.output_len - 1 for call in calls])
    with np.errstate(invalid="ignore"):
        output_limit_s = np.where(gaps > 0, gaps * tpot_s, 0.0)
    begun = most_done(arrival_s, arrival_s + ttft_s, prompt_s, num_workers)
    due_s, either_s = arrival_s + ttft_s + output_limit_s, (prompt_s + output_s, read_s + output_s)
    whole = [most_done(arrival_s, due_s, each_s, num_workers) for each_s in either_s]
    return Fluid(min(begun, *whole), max(float(each_s.sum()) for each_s in either_s) * worker.num_gpus / 3600)


def work(calls: Sequence[Call], worker: WorkerSetup) -> tuple[F64, F64, F64]:
    """Return the seconds that products of prompts take at least, reads for outputs, and outputs beside: `[num_calls]`.

    Of the first two the longer one counts.
    """
    model = worker.step_model
    length, new = (np.array(each, np.float64) for each in ([call.prompt_len for call in calls], new_tokens(calls)))
    first = length - new
    pairs = (length**2 - first**2) / 2
    prompt_s = (model.prompt_token + model.prompt_step / worker.max_step_tokens) * new
    prompt_s += model.prompt_pair * pairs + model.prompt
    gaps = np.array([call.output_len - 1 for call in calls], np.float64)
    contexts = gaps * length + gaps * (gaps + 1) / 2
    return prompt_s, model.step / worker.max_requests * gaps, model.row * gaps + model.context * contexts


def new_tokens(calls: Sequence[Call]) -> I64:
    """Return how many tokens of each prompt no earlier call began with: `[num_calls]`, at least 1."""
    places: dict[tuple[int, int], int] = {}  # in the tree of all beginnings, by the place before and the next block
    found = np.empty(len(calls), np.int64)
    for number in sorted(range(len(calls)), key=lambda each: calls[each].arrival_s):
        place, num_known, num_places = 0, 0, len(places)
        for name in calls[number].blocks.tolist():
            place = places.setdefault((place, name), len(places) + 1)
            num_known += place <= num_places
        found[number] = max(1, calls[number].prompt_len - BLOCK_TOKENS * num_known)
    return found


def most_done(from_s: F64, to_s: F64, work_s: F64, num_workers: int) -> float:
    """Return how many calls can be done at most, parts of calls counted as parts; infinite deadlines always hold."""
    bound = np.isfinite(to_s) & (work_s <= to_s - from_s)
    done = float(np.isinf(to_s).sum())
    if not bound.any():
        return done
    begin_s = float(from_s[bound].min())
    bin_s = max((float(to_s[bound].max()) - begin_s) / NUM_BINS, 1e-9)
    first = np.clip(np.floor((from_s[bound] - begin_s) / bin_s), 0, NUM_BINS - 1).astype(np.int64)
    last = np.clip(np.ceil((to_s[bound] - begin_s) / bin_s) - 1, first, NUM_BINS - 1).astype(np.int64)
    edges = np.arange(NUM_BINS)
    left_s = num_workers * bin_s * np.maximum(0, edges[None, :] - edges[:, None] + 1).astype(np.float64)  # [from, to]
    needs_s = work_s[bound]
    for place in np.argsort(needs_s, kind="stable").tolist():
        around = left_s[: first[place] + 1, last[place] :]  # of all intervals that hold the call's own
        need_s = float(needs_s[place])
        got_s = min(need_s, float(around.min()))
        if got_s > 0:
            around -= got_s
            done += got_s / need_s
    return done
