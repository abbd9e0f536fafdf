"""Models with recurrent layers on real GPUs: a tiny random one says the same with drafts, and on two stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import two_gpus

from diptych.engine import Engine, EngineOptions, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FAMILIES: Final = ["qwen3 next", "kimi linear", "nemotron h", "lfm2"]
PROMPTS: Final = [[first, 5, 7, *range(3 * first)] * 2 for first in range(21)]
GREEDY: Final = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
ASKED: Final = [
    GREEDY,
    SamplingParams(max_tokens=24, temperature=0.4, top_p=0.9, top_k=50, seed=7, ignore_eos=True),
    GREEDY,  # again: earlier answers are known by now, and prefixes cached
]
OPTIONS: Final = EngineOptions(
    device="cuda", dtype="float32", kv_cache_mib=64, max_step_tokens=64, max_requests=20, cuda_graphs="on"
)


def answers(folder: Path, options: EngineOptions) -> tuple[list[tuple[int, ...]], int]:
    """Return what is said, and how much of it was guessed."""
    with Engine(str(folder), options) as engine:
        found = [each for params in ASKED for each in engine.generate_batch(PROMPTS, params)]
    return [each.token_ids for each in found], sum(each.predicted.accepted for each in found)


@pytest.mark.parametrize(
    "changes",
    [{}, {"cuda_graphs": "off", "overlap": "off"}, pytest.param({"tp": 2}, marks=two_gpus.MARKS)],
    ids=["graphs", "kernel by kernel", "two ranks"],
)
@pytest.mark.parametrize("family_model", FAMILIES, indirect=True)
def test_drafts_change_no_token(family_model: Any, tiny_folder: Path, changes: dict[str, Any]) -> None:
    (family_model.folder / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    plain, _ = answers(family_model.folder, replace(OPTIONS, **changes))
    drafted, num_accepted = answers(family_model.folder, replace(OPTIONS, speculate="suffix", **changes))
    print(f"{num_accepted} of {sum(map(len, plain))} tokens were guessed")
    assert drafted == plain
    if "tp" not in changes:  # steps of two ranks may be too short, with so small a model, for guesses to pay
        assert num_accepted > 20


@two_gpus.needs_two_gpus
@pytest.mark.parametrize("family_model", ["qwen3.5 moe, seven layers", "nemotron h, ten layers"], indirect=True)
def test_two_stages_keep_the_states_of_their_layers(family_model: Any, tiny_folder: Path) -> None:
    (family_model.folder / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    plain, _ = answers(family_model.folder, replace(OPTIONS, cuda_graphs="off"))
    staged, _ = answers(family_model.folder, replace(OPTIONS, pp=2, speculate="suffix"))
    assert staged == plain
