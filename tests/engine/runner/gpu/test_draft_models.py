"""A draft model beside a GPU's runner: it follows each step on the same pages, and its passes need no host between."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from draft_models import with_draft
from emulated_gpu import emulated_runner
from guessing_on_gpus import DRAWN, GREEDY, accepted_and_rejected, each_engine, guessed_alike, on_gpus

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.arrays import I64
from diptych.engine import SamplingParams
from diptych.engine.runner.gpu.gpu_draft_model import GpuDraftModel
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.kv_pool import own_views
from diptych.engine.runner.loaded_model import LoadedModel, ModelOptions, load_with_draft
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import NO_TOKEN, DraftBatch, ForwardBatch, ForwardMode, Missed, OnLayer, SamplingBatch

PAGE, PAGES, NUM_REQUESTS = 16, 4, 3  # of a request, as many each
LIMITS = StepLimits(64, NUM_REQUESTS, PAGES, max_drafts=13)
COUNTS = [5, 3, 1]  # tokens to guess
HEARD = range(6)  # three layers of the model, and as many of itself behind them


def emulated(model: LoadedModel, kv: torch.Tensor, listener: Callable[[], OnLayer | None]) -> GpuRunner:
    draft = model.draft
    assert draft is not None
    beside = GpuDraftModel(
        draft,
        lambda heard: emulated_runner(draft, own_views(kv, draft.config, draft.main)[0], LIMITS, layer_listener=heard),
    )
    runner = emulated_runner(model, own_views(kv, model.config, None)[0], LIMITS, layer_listener=listener)
    runner._follower = runner.draft_model = beside
    return runner


def on_device(model: LoadedModel, kv: torch.Tensor, listener: Callable[[], OnLayer | None]) -> GpuRunner:
    from diptych.engine.runner.gpu.new_runner import new_runner

    return new_runner(model, LIMITS, kv.device, with_graphs=True, layer_listener=listener)


class Served:
    """A model that guesses for itself, and requests that it computes token by token."""

    def __init__(self, source: ModelSource, device: str, new_runner: Any) -> None:
        layout = ModelRunner.pool_layout(
            with_draft(source, source).config, num_pages=NUM_REQUESTS * PAGES, page_size=PAGE, dtype="float32"
        )
        kv = torch.full(layout.shape, torch.nan, device=device)
        model = load_with_draft(with_draft(source, source), source, kv, ModelOptions("float32"))
        self.heard: list[int] = []
        self.runner = new_runner(model, kv, lambda: self.heard.append)
        self.tokens = [[(5 * request + i) % 300 for i in range(3 + 5 * request)] for request in range(NUM_REQUESTS)]

    def step(self, rows: list[list[int]], starts: list[int], mode: ForwardMode, *, is_followed: bool = True) -> I64:
        """Compute tokens of all requests; return what is sampled behind their last."""
        lens = np.array(list(map(len, rows)))
        positions = np.concatenate(
            [np.arange(start, start + len(row)) for start, row in zip(starts, rows, strict=True)]
        )
        batch = ForwardBatch(
            mode=mode,
            input_ids=np.concatenate([np.array(row) for row in rows]),
            positions=positions,
            out_slots=np.repeat(np.arange(NUM_REQUESTS), lens) * PAGES * PAGE + positions,
            page_table=self.table,
            seq_lens=np.array(starts) + lens,
            extend_lens=lens,
            num_sampled=np.ones_like(lens),
            is_followed=is_followed,
        )
        self.heard.clear()
        logits = self.runner.logits(batch)
        token_ids: I64 = self.runner.sample(batch, logits, SamplingBatch.alike(NUM_REQUESTS, 0.0))().token_ids
        return token_ids

    @property
    def table(self) -> Any:
        return np.arange(NUM_REQUESTS * PAGES, dtype=np.int32).reshape(NUM_REQUESTS, PAGES)

    def prompts(self) -> None:
        self._append(self.step(self.tokens, [0] * NUM_REQUESTS, ForwardMode.EXTEND))

    def decode(self, *, is_followed: bool = True) -> None:
        ends, rows = [len(tokens) - 1 for tokens in self.tokens], [tokens[-1:] for tokens in self.tokens]
        self._append(self.step(rows, ends, ForwardMode.DECODE, is_followed=is_followed))

    def decode_unseen(self) -> None:
        """As a step that is launched before the host knows the tokens of the one before."""
        ends = [len(tokens) - 1 for tokens in self.tokens]
        rows = [[-1 - request] for request in range(NUM_REQUESTS)]
        self._append(self.step(rows, ends, ForwardMode.DECODE))

    def _append(self, token_ids: I64) -> None:
        for tokens, token_id in zip(self.tokens, token_ids.tolist(), strict=True):
            tokens.append(token_id)

    def draft(self, num_missed: int) -> I64:
        newest = np.array([tokens[-1] for tokens in self.tokens])
        ends = np.array([len(tokens) - 1 for tokens in self.tokens])
        missed = [
            Missed(row, len(tokens) - 1 - num_missed, np.array(tokens[-1 - num_missed : -1]), 0)
            for row, tokens in enumerate(self.tokens)
        ]
        assert self.runner.draft_model is not None
        batch = DraftBatch(newest, ends, self.table, np.array(COUNTS), PAGE, missed)
        found: I64 = self.runner.draft_model.draft(batch)
        return found


@pytest.mark.parametrize(
    ("device", "new_runner"), [("cpu", emulated), pytest.param("cuda", on_device, marks=on_gpus)], ids=["cpu", "gpu"]
)
def test_it_guesses_what_its_model_says_whoever_knew_the_tokens(folder: Path, device: str, new_runner: Any) -> None:
    served = Served(open_model(str(folder)), device, new_runner)
    served.prompts()
    assert served.heard == list(HEARD)
    served.decode()
    served.decode_unseen()
    assert served.heard == list(HEARD)
    for _ in range(4):
        served.decode(is_followed=False)
    served.heard.clear()
    found = served.draft(num_missed=4)
    assert served.heard == [], "nobody hears of what is only guessed"
    before = [len(tokens) for tokens in served.tokens]
    for _ in range(max(COUNTS)):
        served.decode()
    for row, (tokens, start, count) in enumerate(zip(served.tokens, before, COUNTS, strict=True)):
        assert found[row].tolist() == tokens[start : start + count] + [NO_TOKEN] * (max(COUNTS) - count)


ASKED = [
    GREEDY,
    DRAWN,
    SamplingParams(max_tokens=32, temperature=0.0, presence_penalty=0.2, logprobs=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def deeper(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same tokens with many layers more, which add nothing: its draft model pays on any machine."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    first = model.model.layers[0].state_dict()
    silent = {name: 0 * first[name] for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")}
    config = transformers.LlamaConfig.from_pretrained(folder, num_hidden_layers=model.config.num_hidden_layers + 21)
    longer = transformers.LlamaForCausalLM(config)
    missing = longer.load_state_dict(model.state_dict(), strict=False).missing_keys
    longer.load_state_dict({name: {**first, **silent}[name.split(".", 3)[3]] for name in missing}, strict=False)
    path = tmp_path_factory.mktemp("deeper")
    shutil.copytree(folder, path, dirs_exist_ok=True)
    longer.save_pretrained(path)
    return path


def test_silent_layers_change_no_logit(folder: Path, deeper: Path) -> None:
    ids = torch.arange(20)[None]
    model, longer = (transformers.LlamaForCausalLM.from_pretrained(path) for path in (folder, deeper))
    assert len(longer.model.layers) == 24
    assert torch.equal(model(ids).logits, longer(ids).logits)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_engine
def test_a_draft_model_changes_no_token_on_gpus(
    folder: Path, deeper: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    guessed = guessed_alike(deeper, ASKED, f"draft:{folder}", changes)
    assert accepted_and_rejected(guessed)[0] > 0
    assert "while serving" not in capfd.readouterr().err, "a kernel was compiled"
