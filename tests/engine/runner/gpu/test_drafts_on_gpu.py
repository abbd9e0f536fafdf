"""Rows of drafts on real GPUs: a tiny random model says the same with drafts as without, by graphs, beside others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_gpus

from diptych.checkpoints.source import open_model
from diptych.embedded.engine import Generation
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [[first, 5, 7, *range(9 * first)] * 2 for first in range(21)]
GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
ASKED = [
    GREEDY,
    SamplingParams(max_tokens=32, temperature=0.4, top_p=0.9, top_k=50, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=32, temperature=0.0, presence_penalty=0.2, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=32, temperature=0.0, min_tokens=20, stop_token_ids=tuple(range(90))),
    GREEDY,  # again: earlier answers are known by now
]
OPTIONS = EngineOptions(
    device="cuda", dtype="float32", kv_cache_mib=256, max_step_tokens=64, max_requests=20, cuda_graphs="on"
)
ROW = [5, 9, 2, 6, 3, 300]
PAGE, PAGES = 16, 4  # of a request


def answers(folder: Path, options: EngineOptions) -> list[Generation]:
    with Engine(str(folder), options) as engine:
        return [each for params in ASKED for each in engine.generate_batch(PROMPTS, params)]


def tokens(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in generations]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[int, ...]]:
    """One step after the other, kernel by kernel, and nobody guesses."""
    return tokens(answers(folder, replace(OPTIONS, overlap="off", cuda_graphs="off")))


@pytest.mark.parametrize(
    "changes",
    [{}, {"overlap": "off", "cuda_graphs": "off"}, pytest.param({"tp": 2}, marks=two_gpus.MARKS)],
    ids=["graphs and overlap", "neither", "two ranks"],
)
def test_drafts_change_no_token(
    folder: Path, plain: list[tuple[int, ...]], changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    drafted = answers(folder, replace(OPTIONS, speculate="suffix", **changes))
    assert tokens(drafted) == plain
    num_accepted = sum(each.predicted.accepted for each in drafted)
    print(f"{num_accepted} of {sum(map(len, plain))} tokens were guessed")
    assert num_accepted > 20
    assert "while serving" not in capfd.readouterr().err, "a kernel was compiled"


def test_deterministic_outputs_have_the_same_bits_with_drafts(folder: Path) -> None:
    options = replace(OPTIONS, dtype="bfloat16", deterministic=True)
    scored = [replace(params, logprobs=2) for params in ASKED]
    said = []
    for speculate in ("off", "suffix"):
        with Engine(str(folder), replace(options, speculate=speculate)) as engine:
            found = [each for params in scored for each in engine.generate_batch(PROMPTS, params)]
            said.append([(each.token_ids, each.logprobs) for each in found])
    assert said[0] == said[1]
    assert sum(each.predicted.accepted for each in found) > 20


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_has_the_logits_of_single_tokens_beside_any_others(folder: Path, deterministic: bool) -> None:
    """To the bit with `deterministic`; how many have the same bits without is printed."""
    runner = new_runner(folder, deterministic=deterministic)
    expected = torch.stack([run(runner, {0: [token]}, 10 + at)[0] for at, token in enumerate(ROW)])
    counts = {}
    for num_others in range(16):
        rows = {0: ROW, **{each: ROW[: 1 + each % 3] for each in range(1, 1 + num_others)}}
        found = run(runner, rows, 10)[: len(ROW)]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        counts[num_others] = int((found == expected).all(dim=1).sum())
    print(
        f"rows of {len(ROW)} with the bits of single tokens, by others beside, deterministic {deterministic}: {counts}"
    )
    assert not deterministic or set(counts.values()) == {len(ROW)}


def new_runner(folder: Path, *, deterministic: bool) -> Any:
    from diptych.engine.runner.gpu.inputs import StepLimits
    from diptych.engine.runner.gpu.new_runner import new_runner
    from diptych.engine.runner.loaded_model import ModelOptions, load_model
    from diptych.engine.runner.model_runner import ModelRunner

    device, source = torch.device("cuda", 0), open_model(str(folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=16 * PAGES, page_size=PAGE, dtype="bfloat16")
    kv = torch.full(layout.shape, torch.nan, dtype=torch.bfloat16, device=device)
    model = load_model(source, kv, ModelOptions("bfloat16", deterministic=deterministic))
    runner = new_runner(model, StepLimits(256, 16, PAGES, max_drafts=48), device, with_graphs=True)
    run(runner, {request: [(7 * request + i) % 300 for i in range(10)] for request in range(16)}, 0)
    return runner


def run(runner: Any, rows: dict[int, list[int]], start: int) -> torch.Tensor:
    """Compute tokens of requests that have `start` before them: prompts, or rows. Return the logits behind all."""
    lens = np.array([len(row) for row in rows.values()])
    owner = np.repeat(list(rows), lens)
    positions = np.concatenate([np.arange(start, start + length) for length in lens])
    batch = ForwardBatch(
        mode=ForwardMode.DECODE if start else ForwardMode.EXTEND,
        input_ids=np.concatenate([np.array(row) for row in rows.values()]),
        positions=positions,
        out_slots=owner * PAGES * PAGE + positions,
        page_table=(PAGES * np.array(list(rows))[:, None] + np.arange(PAGES)).astype(np.int32),
        seq_lens=start + lens,
        extend_lens=lens,
        num_sampled=lens if start else np.ones_like(lens),
    )
    logits: torch.Tensor = runner.logits(batch).float().clone()
    runner.sample(batch, logits.clone(), SamplingBatch.alike(batch.num_samples, 0.0))()
    return logits
