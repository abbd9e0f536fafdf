"""A tiny random model on real GPUs: however its steps are run, the same tokens; and the memory that was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_gpus
from safetensors.numpy import load_file

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.arrays import I64
from diptych.embedded.engine import Generation
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.runner.gpu.copy_queues import StreamMark
from diptych.engine.values.batch import ForwardBatch, ForwardMode, SamplingBatch

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled
    pytest.mark.skipif(not HAS_GPU, reason="needs a GPU"),
]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=50, seed=7, ignore_eos=True)
PENALISED = SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.3, logprobs=2, ignore_eos=True)
PROMPTS = [[first, 5, 7, *range(9 * first)] for first in range(21)]
OPTIONS = EngineOptions(
    device="cuda", dtype="float32", kv_cache_mib=256, max_step_tokens=64, max_requests=20, cuda_graphs="off"
)
Tokens = list[tuple[int, ...]]


def tokens(folder: Path, options: EngineOptions) -> Tokens:
    """Batches that grow, shrink, and share steps with prompts."""
    with Engine(str(folder), options) as engine:
        return answered(engine)


def answered(engine: Engine) -> Tokens:
    return [
        each.token_ids
        for params in (GREEDY, SEEDED, PENALISED, GREEDY)
        for each in engine.generate_batch(PROMPTS, params)
    ]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tokens:
    """One step after the other, kernel by kernel."""
    return tokens(folder, replace(OPTIONS, overlap="off"))


@pytest.mark.parametrize(
    "changes",
    [{"cuda_graphs": "on", "overlap": "off"}, {"overlap": "on"}, {"cuda_graphs": "on"}],
    ids=["graphs", "overlap", "both"],
)
def test_graphs_and_overlap_change_no_token(folder: Path, plain: Tokens, changes: dict[str, Any]) -> None:
    assert tokens(folder, replace(OPTIONS, **changes)) == plain


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_rows_of_the_embedding_table_in_place_of_tokens_give_the_same_tokens(
    folder: Path, plain: Tokens, cuda_graphs: Any
) -> None:
    """The second time from the prefix cache, beside prompts of tokens."""
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    mixed: list[Any] = [prompt if number % 3 else table[prompt] for number, prompt in enumerate(PROMPTS)]
    with Engine(str(folder), replace(OPTIONS, cuda_graphs=cuda_graphs)) as engine:
        answers = [engine.generate_batch(mixed, GREEDY) for _ in range(2)]
    assert [[each.token_ids for each in some] for some in answers] == [plain[: len(PROMPTS)]] * 2
    assert answers[1][-3].cached_tokens >= len(PROMPTS[-3]) - 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_while_requests_wait(folder: Path, capfd: pytest.CaptureFixture[str], dtype: Any) -> None:
    tokens(folder, replace(OPTIONS, dtype=dtype, cuda_graphs="on"))
    assert "while serving" not in capfd.readouterr().err


@two_gpus.needs_two_gpus
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_two_ranks_give_the_tokens_of_one(folder: Path, plain: Tokens, cuda_graphs: Any) -> None:
    assert tokens(folder, replace(OPTIONS, tp=2, cuda_graphs=cuda_graphs)) == plain


@two_gpus.needs_two_gpus
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_two_stages_give_the_tokens_of_one(folder: Path, plain: Tokens, overlap: Any) -> None:
    """Prompts of up to 182 tokens in steps of 64: chunks are in flight."""
    assert tokens(folder, replace(OPTIONS, pp=2, overlap=overlap)) == plain


@two_gpus.needs_two_gpus
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_two_ranks_with_adapters_give_the_tokens_of_one(
    folder: Path, write_adapter: Callable[..., Any], tmp_path: Path, cuda_graphs: Any
) -> None:
    """Two adapters and the model in each batch, replayed from graphs; the second comes at run time."""
    config = open_model(str(folder)).config
    shapes = {}
    for layer in range(config.num_layers):
        shapes[f"model.layers.{layer}.self_attn.q_proj"] = (config.num_heads * config.head_dim, config.hidden_size)
        shapes[f"model.layers.{layer}.mlp.down_proj"] = (config.hidden_size, config.ffn_size)
    for seed, name in enumerate(("ada", "bob")):
        write_adapter(tmp_path / name, shapes, seed=seed, rank=4 + seed)
    adapters = [("ada", "bob", "")[number % 3] for number in range(len(PROMPTS))]
    answers = []
    for tp in (1, 2):
        options = replace(OPTIONS, tp=tp, cuda_graphs=cuda_graphs, lora=(f"ada={tmp_path / 'ada'}",))
        with Engine(str(folder), options) as engine:
            engine.load_adapter("bob", tmp_path / "bob")
            answers.append([each.token_ids for each in engine.generate_batch(PROMPTS, GREEDY, adapters=adapters)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=two_gpus.MARKS)])
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_pages_that_went_to_host_memory_and_back_give_the_same_tokens(
    folder: Path, plain: Tokens, tp: int, cuda_graphs: Any
) -> None:
    """The pool holds two thirds of the prompts; of those that come again nearly all is cached."""
    small = replace(OPTIONS, kv_cache_mib=4 // tp, host_cache_mib=32, tp=tp, cuda_graphs=cuda_graphs)
    with Engine(str(folder), small) as engine:
        assert answered(engine) == plain
        answers = engine.generate_batch(PROMPTS, GREEDY)
    assert [each.token_ids for each in answers] == plain[: len(PROMPTS)]
    assert sum(each.cached_tokens for each in answers) > 1500


@two_gpus.needs_two_gpus
def test_a_pair_whose_pages_go_to_host_memory_and_back_gives_the_same_tokens(folder: Path, plain: Tokens) -> None:
    """Pages that decode grants have just been evicted, and prefill sends pages that have just come back."""
    small = replace(OPTIONS, kv_cache_mib=4, host_cache_mib=32, cuda_graphs="on")
    with Engine(str(folder), small, prefill=1, decode=1) as engine:
        for _ in range(2):
            assert answered(engine) == plain


@pytest.mark.parametrize("context_len", [512, 1 << 16])
def test_steps_of_the_sizes_that_were_found_give_the_same_tokens(
    folder: Path, plain: Tokens, context_len: int, tmp_path: Path
) -> None:
    """With a long context, the steps that are timed are far longer than those that memory is measured by."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": context_len}))
    found = replace(OPTIONS, max_step_tokens=None, max_requests=None, cuda_graphs="on")
    assert tokens(tmp_path, found) == plain


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_prompts_that_share_kv_while_it_is_made_give_the_tokens_of_each_alone(folder: Path, cuda_graphs: Any) -> None:
    one_by_one = replace(OPTIONS, overlap="off", max_requests=1)
    for first in range(3):
        shared = [first, *range(5, 205)]
        prompts = [shared, [*shared[:100], 9, 9], [*shared, 11, 12, 13], shared] * 8
        with Engine(str(folder), one_by_one) as engine:
            alone = [engine.generate(prompt, GREEDY).token_ids for prompt in prompts[:4]] * 8
        with Engine(str(folder), replace(OPTIONS, overlap="on", cuda_graphs=cuda_graphs)) as engine:
            together = engine.generate_batch(prompts, GREEDY)
        assert [each.token_ids for each in together] == alone
        num_computed = sum(each.prompt_tokens - each.cached_tokens for each in together)
        assert num_computed <= 206 + 2 * 16 * len(prompts)  # of 5,664; the last page of each is its own


def test_a_pool_takes_what_is_left_of_the_share(folder: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    if free < 0.5 * total:
        pytest.skip("somebody else uses the GPU")
    options = replace(OPTIONS, kv_cache_mib=0, gpu_memory_share=0.2, cuda_graphs="on")
    with Engine(str(folder), options) as engine:
        engine.generate_batch(PROMPTS, GREEDY)
        taken = free - torch.cuda.mem_get_info()[0]
    assert 0.15 * total < taken < 0.21 * total


@pytest.fixture(scope="module")
def source(folder: Path) -> ModelSource:
    return open_model(str(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_padded_replay_has_the_logits_of_a_step_that_is_launched(source: ModelSource, dtype: str) -> None:
    """5 rows in a graph of 8. The pool holds no number where nothing was written."""
    launched, replayed = (logits(source, dtype, with_graphs=with_graphs) for with_graphs in (False, True))
    assert launched.isfinite().all()
    torch.testing.assert_close(replayed, launched, rtol=2e-2, atol=2e-2)


def logits(source: ModelSource, dtype: str, *, with_graphs: bool) -> torch.Tensor:
    """Return those of three decode steps, each of the tokens of the one before, nobody waiting in between."""
    from diptych.engine.runner.gpu.inputs import StepLimits
    from diptych.engine.runner.gpu.new_runner import new_runner
    from diptych.engine.runner.loaded_model import ModelOptions, load_model
    from diptych.engine.runner.model_runner import ModelRunner

    device = torch.device("cuda", 0)
    layout = ModelRunner.pool_layout(source.config, num_pages=64, page_size=16, dtype=dtype)
    kv = torch.full(layout.shape, torch.nan, dtype=getattr(torch, dtype), device=device)
    model = load_model(source, kv, ModelOptions(dtype))
    runner = new_runner(model, StepLimits(256, 8, 32), device, with_graphs=with_graphs)
    lens = np.array([3, 16, 17, 33, 60])
    runner.execute(batch_of(ForwardMode.EXTEND, lens, lens, np.arange(lens.sum()) % 300), greedy(5))
    steps, waits = [], []
    for step in range(1, 4):
        batch = batch_of(ForwardMode.DECODE, lens + step, np.ones_like(lens), -1 - np.arange(5))
        steps.append(runner.logits(batch).float().clone())
        waits.append(runner.sample(batch, steps[-1].clone(), greedy(5)))
    chosen = np.stack([wait().token_ids for wait in waits])
    found = torch.stack(steps)
    assert chosen.tolist() == found.argmax(-1).tolist()
    assert (len(runner.recorded.graphs), len(runner.recorded.pieces)) == ((1, 1) if with_graphs else (0, 0))
    return found


def batch_of(mode: ForwardMode, seq_lens: I64, extend_lens: I64, input_ids: I64) -> ForwardBatch:
    """Request i has the pages from 8 * i on."""
    positions = np.concatenate([np.arange(n - new, n) for n, new in zip(seq_lens, extend_lens, strict=True)])
    rows = np.arange(len(seq_lens))
    owner = np.repeat(rows, extend_lens)
    return ForwardBatch(
        mode=mode,
        input_ids=input_ids,
        positions=positions,
        out_slots=owner * 128 + positions,
        page_table=(8 * rows[:, None] + np.arange(4)).astype(np.int32),
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        num_sampled=np.ones_like(rows),
    )


def greedy(num_samples: int) -> SamplingBatch:
    zeros = np.zeros(num_samples, np.int64)
    ones = np.ones(num_samples, np.float32)
    return SamplingBatch(ones * 0, ones, zeros, zeros.astype(np.uint64), zeros)


def test_adapters_change_no_token_by_graphs_nor_where_there_are_more_than_slots(
    folder: Path, write_adapter: Callable[..., Any], tmp_path: Path
) -> None:
    """Against one adapter after the other, kernel by kernel."""
    linear = {"q_proj": (512, 256), "v_proj": (128, 256), "o_proj": (256, 512)}
    shapes = {f"model.layers.{i}.self_attn.{name}": shape for i in range(3) for name, shape in linear.items()}
    shapes |= {"model.embed_tokens": (321, 256), "lm_head": (321, 256)}
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, shapes, seed=seed, rank=8 + 9 * seed)
    loaded = tuple(f"{name}={tmp_path / name}" for name in "abc")
    names = ["abc"[i % 4] if i % 4 < 3 else "" for i in range(len(PROMPTS))]
    with Engine(str(folder), replace(OPTIONS, lora=loaded, overlap="off")) as engine:
        alone = [engine.generate(p, GREEDY, adapter=n).token_ids for p, n in zip(PROMPTS, names, strict=True)]
    with Engine(str(folder), replace(OPTIONS, overlap="off")) as engine:
        base = [each.token_ids for each in engine.generate_batch(PROMPTS, GREEDY)]
    assert [a == b for a, b in zip(alone, base, strict=True)] == [not name for name in names]
    for max_loras in (3, 1):
        options = replace(OPTIONS, lora=loaded, cuda_graphs="on", max_loras=max_loras, max_loaded_loras=3)
        with Engine(str(folder), options) as engine:
            for _ in range(2):
                together = engine.generate_batch(PROMPTS, GREEDY, adapters=names)
                assert [each.token_ids for each in together] == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_outputs_have_the_same_bits_alone_beside_others_and_continued(folder: Path, dtype: Any) -> None:
    options = replace(OPTIONS, dtype=dtype, deterministic=True, cuda_graphs="on", max_step_tokens=40)
    params = replace(SEEDED, logprobs=3)
    with Engine(str(folder), options) as engine:
        together = engine.generate_batch(PROMPTS, params)
        for prompt, beside in zip(PROMPTS[::5], together[::5], strict=True):
            assert said(engine.generate(prompt, params)) == said(beside)
            head, tail = beside.token_ids[:10], replace(params, max_tokens=14)
            assert said(engine.generate([*prompt, *head], tail)) == said(beside)[10:]
        again = engine.generate_batch(PROMPTS, params)  # from the prefix cache
        assert list(map(said, again)) == list(map(said, together))


def said(generation: Generation) -> list[tuple[int, float]]:
    """Return each token and its log-probability, to the bit."""
    assert generation.logprobs is not None
    return list(zip(generation.token_ids, generation.logprobs.logprobs, strict=True))


def test_the_end_of_steps_is_that_of_what_was_queued_before_it_was_asked_for() -> None:
    behind = torch.cuda.Event()
    torch.cuda._sleep(50_000_000)
    begun = torch.cuda.Event()
    begun.record()
    wait = StreamMark().wait
    torch.cuda._sleep(2_000_000_000)
    behind.record()
    wait()
    assert begun.query()
    assert not behind.query(), "what was queued later is not waited for"
    behind.synchronize()
