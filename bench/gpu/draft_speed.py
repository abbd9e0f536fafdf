"""What drafts save on a GPU: requests of Llama-3-8B's shape with `--speculate suffix` and without, in turns.

A worker's core and its way of stepping over the runner of workers; the weights are made up, so every step is computed
in full and its tokens are then those of a known answer: code that is edited, or prose that repeats nothing, behind a
few thousand tokens that have nothing to do with it. Every request has a namespace of its own: no answer helps another
one. A group is served once before it counts, as graphs are captured and costs learned then. Speed is that of tokens
from the time on when no prompt is computed any more.

    python bench/gpu/draft_speed.py [--quick] [--json]
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import speculation_prompts as prompts
from llama_8b import CONTEXT_LEN, model_folder
from model_steps import DEVICE, MAX_REQUESTS, MAX_STEP_TOKENS, load
from report import Report, arguments

from diptych.checkpoints.source import open_model
from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.drafting.late_costs import LateCosts
from diptych.engine.drafting.new_drafter import new_drafter
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.new_runner import new_runner
from diptych.engine.scheduler.stepping import OverlappedStepping, QueuedSteps
from diptych.engine.values.batch import ForwardBatch, OverlapRunner, SamplingBatch, StepResult, WaitForResult
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.limits import MAX_DRAFTS, PROMPT_ROWS, Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.unified.core import UnifiedCore

VOCAB: Final = 128256
PAGE_SIZE: Final = 16
NUM_PAGES: Final = 1 + MAX_REQUESTS * 288
PREFIX_TOKENS: Final = 3000  # before what a request is about
OUTPUT_TOKENS: Final = 192
CASES: Final = (("code edits", 1), ("code edits", 16), ("code edits", 64), ("prose", 64), ("prose", 1))


class Reciter:
    """Computes steps in full, and then says the tokens of texts that are known, each by the seed of its request."""

    def __init__(self, runner: OverlapRunner, texts: Any) -> None:
        self._runner = runner
        self._texts = texts  # [num_texts, longest]

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        return self._runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        wait = self._runner.sample(batch, logits, sampling)
        told = StepResult(self._texts[sampling.seeds.astype(np.int64), sampling.positions])

        def result() -> StepResult:
            wait()
            return told

        return result


class Side:
    """A core over the runner; serves groups of requests, one after the other."""

    def __init__(self, runner: GpuRunner, speculate: str, num_pages: int = NUM_PAGES, pages_per_state: int = 0) -> None:
        self._runner = runner
        cache = KvCache(
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_requests=MAX_REQUESTS + PROMPT_ROWS,
            max_tokens_per_request=CONTEXT_LEN,
            pages_per_state=pages_per_state,
        )
        limits = Limits(CONTEXT_LEN, VOCAB, frozenset(), MAX_STEP_TOKENS, MAX_REQUESTS)
        late = LateCosts(lambda: runner.graph_use.late_times)
        drafter = new_drafter(speculate, limits, time.thread_time, late=late)
        self._core = UnifiedCore(cache, limits, TransferRules(), 0, Role.LOCAL, drafter=drafter)
        self._outputs: dict[int, list[int]] = {}
        self._next_room = 1

    def serve(self, texts: Sequence[tuple[list[int], list[int]]]) -> float:
        """Return tokens a second, once no prompt is computed any more."""
        known = np.zeros((len(texts), max(len(prompt) + len(answer) for prompt, answer in texts)), np.int64)
        for row, (prompt, answer) in zip(known, texts, strict=True):
            row[: len(prompt) + len(answer)] = [*prompt, *answer]
        stepping = OverlappedStepping(self._core, QueuedSteps(Reciter(self._runner, known)), time.monotonic)
        rooms = [self._start(seed, *text) for seed, text in enumerate(texts)]
        while not all(len(self._outputs[room]) > 1 for room in rooms):
            stepping.advance(self._collect)
        num_before, began_s = self._num_tokens(rooms), time.perf_counter()
        while stepping.advance(self._collect):
            pass
        took_s = time.perf_counter() - began_s
        assert [self._outputs[room] for room in rooms] == [answer for _, answer in texts]
        return (self._num_tokens(rooms) - num_before) / took_s

    def _num_tokens(self, rooms: Sequence[int]) -> int:
        return sum(len(self._outputs[room]) for room in rooms)

    def _start(self, seed: int, prompt: list[int], answer: list[int]) -> int:
        room, self._next_room = self._next_room, self._next_room + 1
        params = SamplingParams(max_tokens=len(answer), temperature=0.0, seed=seed, ignore_eos=True)
        self._outputs[room] = []
        request = new_request(room, np.array(prompt, np.int64), params, extra_key=room.to_bytes(8, "little"))
        self._core.handle(Start(request), time.monotonic())
        return room

    def _collect(self) -> None:
        for effect in self._core.pop_effects():
            match effect:
                case EmitTokens(rooms, _, token_ids):
                    for room, tokens in zip(rooms, token_ids, strict=True):
                        self._outputs[room] += tokens
                case Emit(output):
                    assert output.failure is None, output.failure
                    self._outputs[output.room] += output.token_ids


class Words:
    """Stands for a tokenizer: words, blanks and marks are tokens, numbered as they come."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, 1000 + len(self._ids)) for word in re.findall(r" ?\w+|\s+|[^\w\s]", text)]


def texts_of(kind: str, size: int, prefix_tokens: int = PREFIX_TOKENS) -> list[tuple[list[int], list[int]]]:
    asked = {"code edits": prompts.code_edits, "prose": prompts.prose}[kind]()
    words, rng = Words(), random.Random(size)
    pairs = [(words.encode(each.prompt), words.encode(each.answer)[:OUTPUT_TOKENS]) for each in asked]
    prefixes = [[rng.randrange(50_000, 100_000) for _ in range(prefix_tokens)] for _ in range(size)]
    return [([*prefix, *pairs[i % len(pairs)][0]], pairs[i % len(pairs)][1]) for i, prefix in enumerate(prefixes)]


def measure(
    report: Report, sides: dict[str, Side], name: str, case: str, texts: Sequence[tuple[list[int], list[int]]]
) -> None:
    """Serve the group on either side; the first time teaches costs."""
    rates = {}
    for speculate, side in sides.items():
        side.serve(texts)
        rates[speculate] = side.serve(texts)
    off, drafted = rates["off"], rates["suffix"]
    report.row(name, case, drafted, "tok/s", off, "without", drafted / off, {})


def main() -> None:
    options = arguments(__doc__).parse_args()
    limits = StepLimits(MAX_STEP_TOKENS, MAX_REQUESTS, CONTEXT_LEN // PAGE_SIZE, max_drafts=MAX_DRAFTS)
    with model_folder() as folder, Report(as_json=options.json) as report:
        runner = new_runner(load(open_model(str(folder), "dummy"), NUM_PAGES), limits, DEVICE, with_graphs=True)
        sides = {speculate: Side(runner, speculate) for speculate in ("off", "suffix")}
        for kind, size in CASES[:2] if options.quick else CASES:
            measure(report, sides, "gpu/speculation", f"{kind}, B {size}", texts_of(kind, size))


if __name__ == "__main__":
    main()
