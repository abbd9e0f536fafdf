"""What the budget of drafts brings on known texts where steps take what tables say: the same on every machine.

    python bench/draft_budget.py [--quick] [--json]

The drafter of workers guesses the answers of `speculation_prompts`, one request after the other, in the small model's
tokens. Steps take what `bench/results/cpu.md` measured by their number of tokens, and asking 100 us. A value is how
many times sooner the answers come than without drafts; the peer is the same where each step is slower by chance, by a
quarter or so, and at times everything is twice as slow: then costs have to be learned from that.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from report import Report, arguments
from speculation import Text, kinds_of

from diptych.checkpoints.source import open_model
from diptych.engine.drafting.drafter import SourceDrafter
from diptych.engine.drafting.source import Guess
from diptych.engine.drafting.suffix import SuffixSource
from diptych.engine.values.limits import MAX_DRAFTS
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import new_step
from diptych.generation.sampling_params import SamplingParams

STEPS_MS: Final = {  # by tokens, on one core
    "weights in 4 bits": {1: 6.5, 4: 10.3, 8: 16.5, 16: 31.4},
    "weights in float32": {1: 15.9, 4: 17.3, 16: 31.7},
}
ASKING_S: Final = 100e-6
IDLE_S: Final = 10e-6  # of each step, whether or not a request is asked about
Cost = Callable[[int], float]  # seconds of a step of so many tokens


def main() -> None:
    """Simulate and print."""
    parser = arguments(__doc__)
    options = parser.parse_args()
    kinds = kinds_of(open_model("smollm2").tokenizer())
    with Report(as_json=options.json) as report:
        for device, steps_ms in STEPS_MS.items():
            for kind in kinds:
                ratio = speedup(kind.texts, exactly(steps_ms), exactly(steps_ms))
                seeds = range(1 if options.quick else 5)
                noisy = [speedup(kind.texts, exactly(steps_ms), by_chance(exactly(steps_ms), seed)) for seed in seeds]
                report.row(
                    "draft budget", f"{device}: {kind.name}", ratio, "x", peers={"noisy": statistics.mean(noisy)}
                )


def exactly(steps_ms: dict[int, float]) -> Cost:
    sizes, times = list(steps_ms), list(steps_ms.values())
    return lambda num_tokens: float(np.interp(num_tokens, sizes, times)) / 1000


def by_chance(cost: Cost, seed: int) -> Cost:
    rng, is_slow = random.Random(seed), False

    def slower(num_tokens: int) -> float:
        nonlocal is_slow
        is_slow ^= rng.random() < 0.02
        return (2.2 if is_slow else 1.0) * cost(num_tokens) * math.exp(abs(rng.gauss(0, 0.25)))

    return slower


class TimedSource(SuffixSource):
    """Takes its time."""

    took_s = 0.0

    def guess(self, request: Request, at_most: int) -> Guess:
        self.took_s += ASKING_S
        return super().guess(request, at_most)


def speedup(texts: Sequence[Text], cost: Cost, seen: Cost) -> float:
    """Return the time without drafts over that with them, by `cost`; the drafter sees steps take what `seen` says."""
    source, now_s, took_s, plain_s = TimedSource(), 0.0, 0.0, 0.0
    drafter = SourceDrafter({"suffix": source}, lambda: source.took_s, MAX_DRAFTS)
    for room, text in enumerate(texts, 1):
        request = begun(room, text)
        while not request.is_full:
            drafts = drafter.propose([request])
            guess = drafts.get(room, ())
            drafter.launched(new_step([request], [], drafts or None), now_s)
            now_s += seen(1 + len(guess))
            took_s += cost(1 + len(guess)) + IDLE_S
            drafter.committed(now_s)
            plain_s += take(request, text, guess) * cost(1)
        request.has_ended = True
    return plain_s / (took_s + source.took_s)


def begun(room: int, text: Text) -> Request:
    request = new_request(room, np.array(text.prompt, np.int64), SamplingParams(max_tokens=len(text.answer)))
    request.append(text.answer[0])
    request.computed_len = request.prompt_len
    return request


def take(request: Request, text: Text, guess: Sequence[int]) -> int:
    """Give a request its next tokens, by a row with this guess; return how many."""
    left = text.answer[request.num_output_tokens :]
    count = 1
    while count <= len(guess) and count < len(left) and guess[count - 1] == left[count - 1]:
        count += 1
    for token_id in left[:count]:
        request.append(token_id)
    request.computed_len = request.num_tokens - 1
    return count


if __name__ == "__main__":
    main()
