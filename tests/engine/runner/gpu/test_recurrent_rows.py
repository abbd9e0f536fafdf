"""Rows of drafts in recurrent layers by the kernels of GPUs, in the interpreter: states see what came true, once."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from emulated_gpu import Mark, Recorder, emulated_runner
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.attention.staged_batch import single_rows, state_lens
from diptych.engine.models.arithmetic.cpu_ops import CpuOps
from diptych.engine.options.config import EngineOptions
from diptych.engine.runner import late_rows, loaded_model, model_loader
from diptych.engine.runner.backends import choose
from diptych.engine.runner.gpu import inputs
from diptych.engine.runner.gpu.bus import CopyEngines
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.warm_up import _decode, greedy
from diptych.engine.runner.late_rows import LateRows, late_tokens
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, ForwardMode, StateMoves

pytestmark = [  # rows that fill up a graph are computed of what was in memory
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
NUM_PAGES: Final = 64
LIMITS: Final = StepLimits(max_step_tokens=64, max_requests=4, max_pages=NUM_PAGES, max_drafts=12)
FEW: Final = StepLimits(max_step_tokens=64, max_requests=1, max_pages=NUM_PAGES, max_drafts=24)
PROMPTS: Final = {0: [3], 1: [4], 2: [9]}  # of longer ones other tests see what becomes
FAMILIES: Final = {"qwen3 next": 2, "kimi linear": 2, "nemotron h": 3, "lfm2": 5}  # of `STEPS`: others are as slow
RUNGS: Final = (8,)
NewDriver = Callable[..., Any]


class Row(NamedTuple):
    """Tokens of a request in a step, of which some come true."""

    tokens: list[int]
    num_true: int


STEPS: Final[list[dict[int, Row]]] = [
    {0: Row([7], 1), 1: Row([8, 9, 10], 2), 2: Row([11, 12], 1)},
    {0: Row([5, 6, 7, 8], 4), 1: Row([3], 1), 2: Row([1, 2, 3], 2), 3: Row([5, 6, 7, 8], 4)},  # the last is a prompt
    {1: Row([4, 4], 1), 3: Row([1, 1], 2)},  # what came true of others is not told yet
    {0: Row([9], 1), 1: Row([2], 1), 2: Row([2], 1), 3: Row([6], 1)},
    {0: Row([9], 1), 1: Row([2, 3], 2), 2: Row([2], 1), 3: Row([6], 1)},
]


def with_kernels_of_states(*arguments: Any) -> Any:
    """All else is computed by the kernels of CPUs: it is not what is asked about, and slow in the interpreter."""
    from diptych.engine.models.arithmetic.gpu_delta_rule import GpuDeltaRule
    from diptych.engine.models.arithmetic.gpu_state_rules import TritonStateRules

    ops = CpuOps()
    vars(ops).update(state_rules=TritonStateRules(), mixes_by_token=False, delta_rule=GpuDeltaRule)
    return replace(choose(*arguments), ops=ops)


def new_runner(
    source: ModelSource, rungs: tuple[int, ...], device: torch.device, limits: StepLimits = LIMITS
) -> GpuRunner:
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=16, dtype="float32")
    kv = torch.full(layout.shape, torch.nan, device=device)
    backend = "cpu" if device.type == "cpu" else "triton"
    options = ModelOptions("float32", attention_backend=backend, max_requests=limits.max_requests + 2, row_tokens=6)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(loaded_model, "choose", with_kernels_of_states)
        model = load_model(source, kv, options)
    assert model.states is not None
    for layer in source.config.recurrent.layers if source.config.recurrent else ():
        model.states.given(layer).fill_(torch.nan)
    if device.type == "cpu":
        return emulated_runner(model, kv, limits, rungs=rungs, recorder=Recorder())
    from diptych.engine.runner.gpu.new_runner import new_runner as on_gpu

    return on_gpu(model, limits, device, with_graphs=bool(rungs))


def logits_of_true_tokens(runner: GpuRunner, driver: Any, steps: list[dict[int, Row]]) -> Iterator[Tensor]:
    """Run the steps; yield of each the logits behind what came true, row by row."""
    runner.logits(driver.batch(ForwardMode.EXTEND, PROMPTS))
    for rows in steps:
        prompts = rows.keys() - driver._lens.keys()
        batch = driver.batch(
            ForwardMode.MIXED if prompts else ForwardMode.DECODE, {i: r.tokens for i, r in rows.items()}
        )
        is_row = np.array([i not in prompts for i in rows])
        found = runner.logits(replace(batch, num_sampled=np.where(is_row, batch.extend_lens, 1))).clone().cpu()
        first, kept = 0, list[Tensor]()
        for request, row in rows.items():
            num_samples = 1 if request in prompts else len(row.tokens)
            kept += found[first : first + min(num_samples, row.num_true)]
            first += num_samples
            if request not in prompts:
                driver.keep(request, row.num_true, row.tokens)
        yield torch.stack(kept)


def one_by_one(driver: Any, rows: Mapping[int, Row]) -> Tensor:
    """Return the same, of true tokens alone, each of which is a step."""
    found = []
    for request, row in rows.items():
        if request not in driver._lens:
            found.append(driver.extend({request: row.tokens})[0])
        else:
            found += [driver.decode({request: token})[0] for token in row.tokens[: row.num_true]]
    return torch.stack(found)


def differences(runner: GpuRunner, new_driver: NewDriver, source: ModelSource, num_steps: int = 5) -> list[float]:
    """Return how far the logits of each step are from those of single tokens on a CPU, at most."""
    reference = new_driver(source)
    reference.extend(PROMPTS)
    steps = STEPS[:num_steps]
    found = logits_of_true_tokens(runner, new_driver(source), steps)
    return [float((one_by_one(reference, rows) - ours).abs().max()) for rows, ours in zip(steps, found, strict=True)]


@pytest.mark.parametrize("family_model", FAMILIES, indirect=True)
def test_rows_give_the_logits_of_single_tokens_from_graphs(
    new_driver: NewDriver, family_model: Any, device: torch.device, request: pytest.FixtureRequest
) -> None:
    source = open_model(str(family_model.folder))
    runner = new_runner(source, RUNGS, device)
    num_steps = FAMILIES[request.node.callspec.params["family_model"]] if device.type == "cpu" else len(STEPS)
    assert max(differences(runner, new_driver, source, num_steps)) < 1e-3
    late = runner._late_rows
    assert late is not None
    assert {*late.graphs._captured} <= {*late.graphs.rungs}
    assert len(late.graphs) > 0


@pytest.mark.parametrize("family_model", ["lfm2"], indirect=True)
def test_rows_give_the_logits_of_single_tokens_kernel_by_kernel(
    new_driver: NewDriver, family_model: Any, device: torch.device
) -> None:
    source = open_model(str(family_model.folder))
    assert max(differences(new_runner(source, (), device), new_driver, source)) < 1e-3


def test_what_came_true_is_told_with_the_first_of_a_requests_rows_and_lies_where_its_slot_is() -> None:
    none, pages, lens = np.zeros(0, np.int64), np.zeros((0, 1), np.int32), np.array([1, 3, 2, 1])
    moves = StateMoves(np.array([5, 0, 3, 1]), none, none, pages, none, pages, np.array([0, 2, 0, 3]))
    positions = np.arange(7)
    batch = ForwardBatch(
        ForwardMode.DECODE, positions, positions, positions, np.zeros((4, 1), np.int32), lens, lens, lens, states=moves
    )
    single = single_rows(batch)
    assert single.states is not None
    assert single.states.slots.tolist() == [5, 0, 0, 0, 3, 3, 1]
    assert state_lens(single).tolist() == [1, -3, 0, 0, -2, 0, 1]
    for told in (moves, single.states):
        places, slots, row_lens = late_tokens(told, 6)
        assert places.tolist() == [0, 1, 6, 7, 8]
        assert slots.tolist() == [0, 0, 1, 1, 1]
        assert row_lens.tolist() == [2, 0, 3, 0, 0]


@pytest.fixture
def few(family_model: Any) -> GpuRunner:
    """Serves one request at once, of which a step may have more rows than is kept of all slots."""
    assert FEW.max_samples > 3 * 6
    return new_runner(open_model(str(family_model.folder)), (), torch.device("cpu"), FEW)


@pytest.mark.parametrize("family_model", ["lfm2"], indirect=True)
def test_a_step_of_as_many_rows_as_there_may_be_runs_ahead_where_few_requests_are_served(few: GpuRunner) -> None:
    few.execute(_decode(FEW.max_samples, FEW, 16), greedy(FEW.max_samples))


class Bus(CopyEngines):
    """Knows itself."""


@pytest.mark.parametrize("family_model", ["lfm2"], indirect=True)
def test_all_that_is_staged_takes_the_bus_that_was_given(few: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    new = importlib.import_module("diptych.engine.runner.gpu.new_runner")
    monkeypatch.setattr(new, "CudaCapture", lambda device: Recorder())
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    given = {"limits": FEW, "device": torch.device("cpu"), "with_graphs": False, "bus": (bus := Bus())}
    runner = new._runner(few.model, new._none_sampled, lambda: None, **given)
    assert runner._inputs._staging._bus is bus
    assert runner._late_rows._staging._bus is bus


@pytest.mark.parametrize("family_model", ["lfm2"], indirect=True)
def test_rows_and_what_came_true_of_them_are_no_longer_than_what_is_kept(few: GpuRunner) -> None:
    none, pages = np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
    moves = StateMoves(np.array([0]), none, none, pages, none, pages, np.array([7]))
    late = few._late_rows
    assert late is not None
    with pytest.raises(AssertionError, match="more came true than is kept of a row"):
        late.queue(moves)
    ones = np.arange(7)
    table = np.zeros((1, 1), np.int32)
    length = np.array([7])
    row = ForwardBatch(ForwardMode.DECODE, ones, ones, ones, table, length, length, length, states=moves)
    with pytest.raises(AssertionError, match="a row is longer than is kept of it"):
        few.logits(row)


@pytest.mark.parametrize("family_model", ["lfm2"], indirect=True)
def test_what_a_pass_takes_is_measured_by_how_many_tokens_came_true(few: GpuRunner) -> None:
    """A fake clock that runs while something is queued."""
    late, now_s, told = few._late_rows, 0.0, []
    assert late is not None
    assert not few.graph_use.late_times

    def queue(moves: StateMoves) -> None:
        nonlocal now_s
        assert moves.late_lens is not None
        told.append(moves.late_lens.tolist())
        now_s += 0.001 * int(moves.late_lens.sum()) + (1.0 if len(told) % 4 == 1 else 0.0)  # the first is slow

    late.queue = queue  # type: ignore[method-assign]
    late.measure(lambda: None, lambda: now_s)
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 18]
    assert dict(few.graph_use.late_times) == pytest.approx({size: 0.001 * size for size in sizes})
    assert told[::4] == [[1], [2], [3], [4], [4, 2], [4, 4], [4, 4, 4], [6, 6, 4], [6, 6, 6]]


@pytest.mark.parametrize("family_model", ["lfm2"], indirect=True)
def test_other_weights_take_what_the_first_ones_were_measured_to_take(
    few: GpuRunner, family_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of the same shape, and nothing may be tried while requests run: states would be overwritten."""
    source, late, times = open_model(str(family_model.folder)), few._late_rows, [(1, 0.5), (8, 1.0)]
    assert late is not None
    kv = torch.zeros(ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=16, dtype="float32").shape)
    loader = model_loader.ModelLoader(EngineOptions(page_size=16), torch.device("cuda"), None)
    monkeypatch.setattr(late, "measure", lambda finish, clock: vars(late).update(times=times))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(model_loader, "warm_up", lambda *steps: None)
    monkeypatch.setattr(loader, "_load_beside", lambda *parts: few.model)
    monkeypatch.setattr(loader, "_new_runner", lambda *parts, **more: new_runner(source, (), torch.device("cpu"), FEW))
    loader._warm_up(few.model, few, kv)
    for other in (loader.in_place(few).runner(), loader.load(source, kv, lambda: None)):
        assert other is not few
        assert other.graph_use.late_times == times


# mistakes


def seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LateRows.queue

    def twice(self: LateRows, moves: StateMoves) -> None:
        real(self, moves)
        real(self, moves)

    monkeypatch.setattr(LateRows, "queue", twice)


def never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateRows, "queue", lambda self, moves: None)


def one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that did not come true is seen."""
    real = LateRows.queue

    def more(self: LateRows, moves: StateMoves) -> None:
        assert moves.late_lens is not None
        real(self, replace(moves, late_lens=np.where(moves.late_lens > 0, moves.late_lens + 1, 0)))

    monkeypatch.setattr(LateRows, "queue", more)


def of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(moves: StateMoves, row_tokens: int) -> Any:
        places, slots, lens = late_tokens(moves, row_tokens)
        return np.where(places // row_tokens == 2, places + row_tokens, places), slots, lens

    monkeypatch.setattr(late_rows, "late_tokens", shifted)


def tried_on_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows bring their slots up to date, wrong guesses and all."""
    monkeypatch.setattr(inputs, "state_lens", lambda batch: abs(state_lens(batch)))


def not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row was given is that of the row before."""
    from diptych.engine.models.arithmetic.gpu_state_rules import TritonStateRules

    monkeypatch.setattr(TritonStateRules, "keep_rows", lambda self, *given: None)


def ends_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a row is mixed with the state as it was before the row."""
    monkeypatch.setattr(inputs, "state_lens", lambda batch: np.ones(batch.batch_size, np.int32))


MISTAKES: Final = [seen_twice, never_seen, one_too_many, of_another_row, tried_on_slots, not_kept, ends_are_lost]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("family_model", ["lfm2"], indirect=True)
def test_a_state_that_saw_other_tokens_changes_logits(
    new_driver: NewDriver,
    family_model: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
) -> None:
    source = open_model(str(family_model.folder))
    runner = new_runner(source, (), device)
    mistake(monkeypatch)
    found = differences(runner, new_driver, source, 2)
    assert not all(each < 1e-2 for each in found), found  # or no numbers
