"""The runner of GPUs, on a CPU: what stands for the device computes by torch, and a replay does the same work again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.engine.attention.backend import PhasedAttention
from diptych.engine.attention.torch_backend import TorchAttention
from diptych.engine.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult
from diptych.engine.loader.source import ModelSource, open_model
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.graphs import Captured, Graphs
from diptych.engine.runner.gpu.inputs import StepInputs, StepLimits
from diptych.engine.runner.gpu.ladder import ladder
from diptych.engine.runner.gpu.staging import Staging
from diptych.engine.runner.gpu.warm_up import warm_up
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.runner.sampling import sample_step
from diptych.engine.runner.staged_batch import StagedBatch
from diptych.engine.runtime.queued_steps import QueuedSteps
from diptych.engine.sampling_params import SamplingParams

PAGE, NUM_PAGES, VOCAB, MAX_REQUESTS = 4, 128, 321, 8
LIMITS = StepLimits(max_step_tokens=16, max_requests=MAX_REQUESTS, max_pages=NUM_PAGES)
NewEngine = Callable[..., Any]


class TensorAttention(TorchAttention):
    """Reads the step from its tensors when it attends, as a recorded kernel does."""

    def capture_metadata(self, batch: StagedBatch) -> None:
        self._recorded = batch

    def replay_metadata(self, batch: StagedBatch) -> None:
        assert batch.page_table.data_ptr() == self._recorded.page_table.data_ptr()

    def forward_decode(self, qkv: Tensor, layer: int, out: Tensor) -> None:
        recorded = self._recorded
        used = recorded.seq_lens > 0
        assert (recorded.out_slots[~used] == -1).all(), "padding rows write nowhere"
        count = int(used.sum())
        assert used[:count].all(), "padding comes last"
        now = replace(
            recorded,
            positions=recorded.positions[:count],
            out_slots=recorded.out_slots[:count],
            page_table=recorded.page_table[:count],
            seq_lens=recorded.seq_lens[:count],
        )
        super().init_forward_metadata(now)
        super().forward_decode(qkv[:count], layer, out[:count])
        out[count:] = torch.nan


class Recorder:
    """Records work by keeping it."""

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        output = torch.full_like(work(), torch.nan)

        def replay() -> None:
            with torch.inference_mode():
                output.copy_(work())

        return Captured(replay, output)

    def used_nbytes(self) -> int:
        return 0


class Mark:
    """A mark of a device that has always come so far."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@dataclass
class Tokens:
    """What was sampled."""

    result: StepResult

    @property
    def token_ids(self) -> Tensor:
        return torch.from_numpy(self.result.token_ids)

    def start_copy(self) -> WaitForResult:
        return lambda: self.result


def gpu_like(source: ModelSource, with_graphs: bool) -> GpuRunner:
    """A model without a number in its pool, and limits that a step may reach but not pass."""
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    kv, cpu = torch.full(layout.shape, torch.nan), torch.device("cpu")
    model: LoadedModel = load_model(source, kv, ModelOptions("float32"))
    attention = TensorAttention(source.config, kv, torch.float32)
    phased = PhasedAttention(model.attention._extend, attention, attention) if with_graphs else model.attention

    def launch_sampling(batch: ForwardBatch, logits: Tensor, sampling: SamplingBatch) -> Tokens:
        return Tokens(sample_step(model.sampler, logits, sampling, batch.prompt_rows))

    return GpuRunner(
        replace(model, attention=phased),
        StepInputs(LIMITS, Staging(LIMITS.nbytes, cpu, Mark), cpu),
        launch_sampling,
        torch.zeros(MAX_REQUESTS, dtype=torch.int64),
        Graphs(ladder(MAX_REQUESTS) if with_graphs else (), Recorder()),
    )


PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.5, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.9, seed=5, frequency_penalty=1.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=6, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.0, logit_bias={7: 4.0}, min_tokens=3, prompt_logprobs=1),
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
]


def tokens(engine: Any) -> list[list[int]]:
    for room, wanted in enumerate(PARAMS):
        engine.start_with(room, [room + 1, *range(50, 60 + 9 * room)], wanted)
        engine.step()
    engine.run()
    return [engine.tokens(room) for room in range(len(PARAMS))]


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> ModelSource:
    return open_model(str(tiny_folder))


@pytest.fixture
def expected(new_engine: NewEngine, source: ModelSource) -> list[list[int]]:
    """What the runner of CPUs gives, step by step."""
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
    runner = ModelRunner(source, torch.full(layout.shape, torch.nan), dtype="float32")
    return tokens(new_engine(NUM_PAGES, max_requests=MAX_REQUESTS, runner=runner, vocab_size=VOCAB))


@pytest.mark.parametrize("with_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one-by-one", "overlapped"])
def test_a_step_gives_the_same_tokens_padded_and_replayed_and_behind_one_whose_tokens_nobody_knows(
    new_engine: NewEngine, source: ModelSource, expected: list[list[int]], with_graphs: bool, overlap: bool
) -> None:
    runner = gpu_like(source, with_graphs)
    if not with_graphs:
        warm_up(runner, runner, LIMITS, PAGE, longest=16)
    engine = new_engine(
        NUM_PAGES, max_requests=MAX_REQUESTS, overlap=overlap, runner=runner, vocab_size=VOCAB, worker=QueuedSteps
    )
    assert tokens(engine) == expected
    assert len(runner.graphs) == (4 if with_graphs else 0)  # of 1, 2, 4 and 8 rows
