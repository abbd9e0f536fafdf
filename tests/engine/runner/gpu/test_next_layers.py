"""The layer that predicts one token more beside a GPU's runner: from graphs too, it guesses what transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sure_next_layer
import torch
from emulated_gpu import emulated_runner
from guessing_on_gpus import DRAWN, GREEDY, PROMPTS, accepted_and_rejected, each_engine, guessed_alike, on_gpus
from next_layers import FAMILIES, PAGE, TOKENS, Served, guesses, random_folder, with_next
from sure_next_layer import by_rows
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.gpu.gpu_next_layer import GpuNextLayer
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.kv_pool import own_views
from diptych.engine.runner.loaded_model import ModelOptions, load_with_draft

LIMITS = StepLimits(64, 3, 12, max_drafts=13)


def emulated(**recorded: Any) -> Callable[[ModelSource, Tensor], GpuRunner]:
    def new(source: ModelSource, kv: Tensor) -> GpuRunner:
        model = load_with_draft(source, source.next_layer(), kv, ModelOptions("float32"))
        draft = model.draft
        assert draft is not None
        own = own_views(kv, draft.config, draft.main)[0]
        beside = GpuNextLayer(
            draft, lambda heard: emulated_runner(draft, own, LIMITS, layer_listener=heard, **recorded), LIMITS
        )
        runner = emulated_runner(model, own_views(kv, model.config, None)[0], LIMITS, **recorded)
        runner._follower = runner.draft_model = beside
        return runner

    return new


def on_device(source: ModelSource, kv: Tensor) -> GpuRunner:
    from diptych.engine.runner.gpu.new_runner import new_runner

    model = load_with_draft(source, source.next_layer(), kv, ModelOptions("float32"))
    return new_runner(model, LIMITS, kv.device, with_graphs=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("device", "new_runner"),
    [
        ("cpu", emulated()),
        ("cpu", emulated(rungs=(16,), token_rungs=(16, 32))),
        pytest.param("cuda", on_device, marks=on_gpus),
    ],
    ids=["kernel by kernel", "from graphs", "gpu"],
)
def test_it_guesses_what_transformers_does(
    family: str, device: str, new_runner: Any, tmp_path: Path, tiny_folder: Path
) -> None:
    folder = random_folder(tmp_path / "next", family, tiny_folder)
    assert all(ours == theirs for ours, theirs in guesses(family, folder, new_runner, device))
    served = Served(with_next(open_model(str(folder))), new_runner, device)
    served.compute(TOKENS, 0, 7)
    layer = served.runner.draft_model
    own, elsewhere = (int(served.table[0, page]) * PAGE + 2 for page in (1, 9))  # of the last token, and of nobody's
    row = layer.row(own)
    layer.put_row(elsewhere, row)
    assert layer.row(elsewhere) == row != b""
    assert layer.row(elsewhere + 1) == b""


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_engine
def test_it_changes_no_token_on_gpus(
    tmp_path: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """The model knows what comes behind a token, and its layer what comes behind that: greedy guesses come true."""
    folder = sure_next_layer.write(tmp_path / "sure", by_rows)
    guessed = guessed_alike(folder, [GREEDY, DRAWN], "mtp", changes)
    accepted, rejected = accepted_and_rejected(guessed[: len(PROMPTS)])
    assert accepted > 10 * rejected
    assert "while serving" not in capfd.readouterr().err, "a kernel was compiled"
