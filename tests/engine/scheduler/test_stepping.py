"""Steps one after the other and overlapped: the same tokens, whatever ends or gives way in between."""

from __future__ import annotations

import random
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from null_runner import NullRunner, expected_output

from diptych.checkpoints.source import open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.schedule.batch_builder import placeholder
from diptych.engine.scheduler.stepping import OverlappedStepping, TpModelWorkerClient
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch, StepResult
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.output import FailureCode
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.compiler import Compiler

VOCAB, PAGE, NUM_PAGES = 1000, 4, 128
LAUNCH_S, RUN_S = 0.75, 1.0

Engine = Any  # the fixture's class: test helpers can't be imported
NewEngine = Callable[..., Engine]


@pytest.mark.parametrize("num_pages", [24, 200])
def test_overlapped_steps_give_the_tokens_of_the_model(new_engine: NewEngine, num_pages: int) -> None:
    """In the small pool requests are retracted all the time; lengths of 1 end with their first token."""
    rng = random.Random(7)
    engine = new_engine(num_pages, 16, 4, overlap=True)
    engine.expect_short_outputs()
    asked = {
        room: ([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 30)) for room in range(40)
    }
    for room, (prompt, max_tokens) in asked.items():
        engine.start(room, prompt, max_tokens)
        for _ in range(rng.randrange(4)):
            engine.step()
    engine.run()
    assert (engine.core.report().counts.retractions > 0) == (num_pages == 24)
    for room, (prompt, max_tokens) in asked.items():
        assert engine.tokens(room) == expected_output(prompt, max_tokens, VOCAB)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_between_any_two_steps_changes_no_token(new_engine: NewEngine, overlap: bool) -> None:
    rng = random.Random(11)
    engine = new_engine(40, 16, 6, overlap=overlap)
    beginnings = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(3)]
    asked, num_flushed = {}, 0
    for room in range(30):
        prompt = rng.choice(beginnings)[: rng.randrange(1, 13)] + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(9))
        ]
        asked[room] = (prompt, rng.randrange(1, 14))
        engine.start(room, *asked[room])
        for _ in range(rng.randrange(5)):
            engine.step()
            num_flushed += engine.cache.flush() if rng.random() < 0.4 else 0
            assert engine.cache.audit(engine.core.report().holders) == []
    engine.run()
    assert num_flushed > 20
    for room, (prompt, max_tokens) in asked.items():
        assert engine.tokens(room) == expected_output(prompt, max_tokens, VOCAB)


@pytest.mark.parametrize(
    "fields",
    [{}, {"overlap": True}, {"overlap": True, "mixed_step_s": 1.0}],
    ids=["one by one", "overlapped", "mixed"],
)
def test_watched_steps_are_all_noted_however_they_are_run(new_engine: NewEngine, fields: dict[str, Any]) -> None:
    rng = random.Random(3)
    engine = new_engine(200, 16, 4, **fields)
    log = engine._stepping.meter.log
    log.switch(True)
    asked = {room: (rng.randrange(1, 30), rng.randrange(1, 30)) for room in range(12)}
    for room, (prompt_len, max_tokens) in asked.items():
        engine.start(room, [room * 31 + place for place in range(prompt_len)], max_tokens)
    engine.run()
    sizes = [step.size for step in log.pop().steps]
    tokens = sum(len(engine.tokens(room)) for room in asked)
    outputs = sum(size.output_tokens for size in sizes)
    assert tokens - len(asked) <= outputs <= tokens + len(asked)  # without first ones; some beyond an end
    assert sum(size.prompt_tokens for size in sizes) <= sum(prompt_len for prompt_len, _ in asked.values())
    assert max(size.num_requests for size in sizes) <= 4


def test_a_stop_token_ends_a_request_whose_next_token_is_computed_already(new_engine: NewEngine) -> None:
    engine = new_engine(overlap=True)
    prompt = [3, 1, 4, 1, 5]
    tokens = expected_output(prompt, 20, VOCAB)
    stop = tokens[9]
    params = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(stop,))
    engine.start_with(1, prompt, params)
    engine.run()
    assert engine.tokens(1) == tokens[: tokens.index(stop) + 1]
    assert engine.cache.tree.num_pages == (len(prompt) + tokens.index(stop)) // PAGE


def test_an_abort_while_a_step_runs_is_answered_at_once_and_frees_the_pages_after_it(new_engine: NewEngine) -> None:
    engine = new_engine(overlap=True)
    engine.start(1, [1, 2, 3], 50)
    for _ in range(4):
        engine.step()
    engine.abort(1)
    engine.collect()
    assert engine.outputs[1][-1].failure.code is FailureCode.ABORTED
    assert engine.cache.pool.counts()["owned"] > 0
    num_outputs = len(engine.outputs[1])
    engine.run()
    assert engine.cache.pool.counts()["owned"] == 0
    assert len(engine.outputs[1]) == num_outputs


def test_penalties_seeds_and_log_probabilities_are_the_same_with_overlap(
    new_engine: NewEngine, tiny_folder: Path
) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.5, ignore_eos=True),
        SamplingParams(max_tokens=17, temperature=0.9, seed=5, frequency_penalty=1.0, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=6, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias={7: 4.0}, min_tokens=3, prompt_logprobs=1),
    ]
    outputs = []
    for overlap in (False, True):
        engine = new_engine(NUM_PAGES, overlap=overlap, runner=tiny_runner(tiny_folder), vocab_size=321)
        for room, wanted in enumerate(params):
            engine.start_with(room, [room + 1, 50, 60, 70, 80], wanted)
            engine.step()
        engine.run()
        outputs.append({room: engine.outputs[room] for room in range(len(params))})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_step_tokens", [7, 64])
def test_mixed_steps_give_the_tokens_of_steps_of_one_kind(
    new_engine: NewEngine, tiny_folder: Path, overlap: bool, max_step_tokens: int
) -> None:
    tokens = []
    for is_mixed in (False, True):
        runner = tiny_runner(tiny_folder)
        engine = new_engine(NUM_PAGES, max_step_tokens, overlap=overlap, runner=runner, vocab_size=321)
        for room in range(6):
            engine.start(room, [(room * 31 + i * 7) % 321 for i in range(5 + 6 * room)], 16)
            engine.step()
            engine.step()
            if not is_mixed:
                engine.run()
        engine.run()
        tokens.append([engine.tokens(room) for room in range(6)])
    assert tokens[0] == tokens[1]


def test_a_grammar_sees_every_token_before_the_next_is_sampled(new_engine: NewEngine, byte_tokenizer: Any) -> None:
    outputs = []
    for overlap in (False, True):
        compiler = Compiler(byte_tokenizer, 267, [0])
        engine = new_engine(NUM_PAGES, overlap=overlap, vocab_size=267, compiler=compiler)
        for room in range(4):
            grammar = Grammar(GrammarKind.REGEX, f"[ab]{{3,{9 + room}}}(cd|e)")
            engine.start_with(room, [room + 1, 2], SamplingParams(max_tokens=30, temperature=0.0, grammar=grammar))
        engine.run()
        outputs.append([byte_tokenizer.decode(engine.tokens(room)) for room in range(4)])
    assert outputs[0] == outputs[1]
    assert all(re.fullmatch("[ab]{3,12}(cd|e)", text) for text in outputs[0])


def tiny_runner(folder: Path) -> ModelRunner:
    source = open_model(str(folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    return ModelRunner(source, torch.full(layout.shape, torch.nan), dtype="float32")


class FailingRunner(NullRunner):
    """Breaks in its first step."""

    def logits(self, batch: ForwardBatch) -> list[int]:
        raise RuntimeError("broken")


def test_what_a_step_raises_is_raised_where_its_result_is_awaited(new_engine: NewEngine) -> None:
    worker = TpModelWorkerClient(FailingRunner(np.zeros((4, PAGE), dtype=np.uint64), VOCAB))
    worker.forward(one_token())
    worker.sample(any_sampling())
    with pytest.raises(RuntimeError, match="broken"):
        worker.result()
    worker.close()


class WatchedRunner(NullRunner):
    """Tells when its first forward pass runs, and goes on when told."""

    def __init__(self) -> None:
        super().__init__(np.zeros((4, PAGE), dtype=np.uint64), VOCAB)
        self.running, self.go_on = threading.Event(), threading.Event()
        self.inputs: list[list[int]] = []

    def logits(self, batch: ForwardBatch) -> list[int]:
        self.inputs.append(batch.input_ids.tolist())
        self.running.set()
        assert self.go_on.wait(60)
        return super().logits(batch)


def test_a_pass_can_be_queued_while_another_runs_and_gets_its_tokens() -> None:
    runner = WatchedRunner()
    worker = TpModelWorkerClient(runner)
    worker.forward(one_token())
    worker.sample(any_sampling())
    assert runner.running.wait(60)
    worker.forward(one_token(placeholder(0)))
    runner.go_on.set()
    first: StepResult = worker.result()
    worker.sample(any_sampling())
    worker.result()
    worker.close()
    assert runner.inputs == [[5], first.token_ids.tolist()]


class Device:
    """A `ModelWorker` in virtual time: the host launches a step while the one before it runs."""

    def __init__(self, run_s: float) -> None:
        self.now_s = 0.0
        self._run_s = run_s
        self._ends: deque[float] = deque()
        self._free_s = 0.0

    def forward(self, batch: ForwardBatch) -> None:
        self.now_s += LAUNCH_S
        self._free_s = max(self.now_s - LAUNCH_S, self._free_s) + self._run_s
        self._ends.append(self._free_s)

    def sample(self, sampling: SamplingBatch) -> None: ...

    def result(self) -> StepResult:
        end_s = self._ends.popleft()
        late_s, self.now_s = max(0.0, self.now_s - end_s), max(self.now_s, end_s)
        return StepResult(np.zeros(1, np.int64), late_s=late_s)

    def close(self) -> None: ...


class Steps:
    """A core that has so many steps to do, each behind the other."""

    can_overlap = True

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.commits_s: list[float] = []

    def plan(self, now_s: float) -> ForwardBatch | None:
        self.num_steps -= 1
        return replace(one_token(), mode=ForwardMode.DECODE) if self.num_steps >= 0 else None

    def sampling(self) -> SamplingBatch:
        return any_sampling()

    def commit(self, result: StepResult, now_s: float) -> None:
        self.commits_s.append(now_s)


def test_a_step_lasts_until_the_device_is_done_not_until_somebody_asks() -> None:
    """The host asks when it has launched the next one, which takes longer than the device has left."""
    device, core = Device(RUN_S), Steps(5)
    stepping: Any = OverlappedStepping(core, device, lambda: device.now_s)  # type: ignore[arg-type]
    while stepping.advance(lambda: None):
        pass
    assert [step.took_s for step in stepping.meter.last_steps()] == [RUN_S] * 5
    assert core.commits_s[0] == 2 * LAUNCH_S


def test_times_of_steps_add_up_where_the_host_takes_longer_than_the_device() -> None:
    device, core = Device(LAUNCH_S / 2), Steps(4)

    def tell() -> None:
        device.now_s += 1.0

    stepping: Any = OverlappedStepping(core, device, lambda: device.now_s)  # type: ignore[arg-type]
    while stepping.advance(tell):
        pass
    steps = stepping.meter.last_steps()
    assert [step.began_s + step.took_s for step in steps[:-1]] == [step.began_s for step in steps[1:]]


def one_token(token_id: int = 5) -> ForwardBatch:
    one = np.ones(1, dtype=np.int64)
    return ForwardBatch(
        mode=None,  # type: ignore[arg-type]  # the null model does not ask
        input_ids=one * token_id,
        positions=one - 1,
        out_slots=one * PAGE,
        page_table=np.ones((1, 1), dtype=np.int32),
        seq_lens=one,
        extend_lens=one,
        num_sampled=one,
    )


def any_sampling() -> SamplingBatch:
    one = np.ones(1, dtype=np.float32)
    zero = np.zeros(1, dtype=np.int64)
    return SamplingBatch(temperature=one * 0, top_p=one, top_k=zero, seeds=zero.astype(np.uint64), positions=zero)
