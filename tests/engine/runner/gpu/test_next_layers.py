"""The layer that predicts one token more beside a GPU's runner: from graphs too, it guesses what transformers does.

So does an EAGLE head, which guesses what the published architecture does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sure_next_layer
import torch
from eagle_heads import by_rows as head_by_rows
from eagle_heads import guesses_by_reference, open_both, random_folders, sure_folders
from emulated_gpu import emulated_runner
from guessing_on_gpus import DRAWN, GREEDY, PROMPTS, accepted_and_rejected, each_engine, guessed_alike, on_gpus
from next_layers import (
    FAMILIES,
    MAX_ROW,
    PAGE,
    STATELESS,
    TOKENS,
    NewRunner,
    Served,
    guesses_by_transformers,
    guesses_of,
    random_folder,
    with_next,
)
from sure_next_layer import by_rows
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine.runner.gpu.gpu_next_layer import GpuNextLayer
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.kv_pool import own_views
from diptych.engine.runner.loaded_model import ModelOptions, load_with_draft

ByOthers = Callable[[Sequence[int], int], list[int]]
LIMITS = StepLimits(64, 3, 12, max_drafts=13)


def emulated(draft_source: ModelSource, **recorded: Any) -> NewRunner:
    def new(source: ModelSource, kv: Tensor) -> GpuRunner:
        model = load_with_draft(source, draft_source, kv, ModelOptions("float32"))
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


def on_device(draft_source: ModelSource) -> NewRunner:
    def new(source: ModelSource, kv: Tensor) -> GpuRunner:
        from diptych.engine.runner.gpu.new_runner import new_runner

        options = ModelOptions("float32", max_requests=4, row_tokens=MAX_ROW)
        model = load_with_draft(source, draft_source, kv, options)
        return new_runner(model, LIMITS, kv.device, with_graphs=True)

    return new


def open_family(family: str, base: Path, words: Path) -> tuple[ModelSource, ModelSource, ByOthers]:
    """Return a random model with draft layers, what guesses for it, and what that is to guess."""
    if family == "Eagle":
        folders = random_folders(base, words)
        return *open_both(folders), partial(guesses_by_reference, folders.head)
    source = with_next(open_model(str(random_folder(base / "next", family, words))))
    return source, source.next_layer(), partial(guesses_by_transformers, family)


@pytest.mark.parametrize("family", [*FAMILIES, "Eagle"])
@pytest.mark.parametrize(
    ("device", "new_runner"),
    [
        ("cpu", emulated),
        ("cpu", partial(emulated, rungs=(16,), token_rungs=(16, 32))),
        pytest.param("cuda", on_device, marks=on_gpus),
    ],
    ids=["kernel by kernel", "from graphs", "gpu"],
)
def test_it_guesses_what_others_compute(
    family: str, device: str, new_runner: Any, tmp_path: Path, tiny_folder: Path
) -> None:
    if device == "cpu" and family not in {*STATELESS, "Eagle"}:
        pytest.skip("rows of what keeps states are computed by kernels of GPUs alone")
    source, draft, by_others = open_family(family, tmp_path, tiny_folder)
    assert all(ours == theirs for ours, theirs in guesses_of(Served(source, new_runner(draft), device), by_others))
    served = Served(source, new_runner(draft), device)
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
@pytest.mark.parametrize("source", ["mtp", "eagle"])
def test_it_changes_no_token_on_gpus(
    tmp_path: Path, source: str, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """The model knows what comes behind a token, and its layer what comes behind that: greedy guesses come true."""
    if source == "mtp":
        folder, speculate = sure_next_layer.write(tmp_path / "sure", by_rows), "mtp"
    else:
        folder, head = sure_folders(tmp_path, head_by_rows)
        speculate = f"eagle:{head}"
    guessed = guessed_alike(folder, [GREEDY, DRAWN], speculate, changes)
    accepted, rejected = accepted_and_rejected(guessed[: len(PROMPTS)])
    assert accepted > 10 * rejected
    assert "while serving" not in capfd.readouterr().err, "a kernel was compiled"
