"""Images by the runner of GPUs, on a GPU and emulated: logits and tokens of transformers, with graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from emulated_gpu import Recorder, emulated_runner
from row_models import RowModel, request_of_rows, rows_like
from tiny_vision import VisionModel, picture, save_qwen2_5_vl, save_qwen3_vl
from vision_engine import NUM_OUTPUTS, NUM_PAGES, PAGE_SIZE, TWO_IMAGES, VisionEngine, request_of, seen

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import ModelSource, open_model
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.ladder import ladder
from diptych.engine.runner.loaded_model import ModelOptions, load_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ImageCounts, ImageRows

MAX_REQUESTS: Final = 8
LIMITS: Final = StepLimits(max_step_tokens=64, max_requests=MAX_REQUESTS, max_pages=64)
TOKEN_RUNGS: Final = (16, 64)
OF_GPU: Final = (
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)
HEADS: Final[dict[str, Any]] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # as kernels norm
TURNING: Final = {"rope_type": "default", "rope_theta": 10000.0}
SAVED: Final[dict[str, Callable[..., VisionModel]]] = {
    "qwen2.5-vl": lambda folder: save_qwen2_5_vl(
        folder,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters={**TURNING, "mrope_section": [4, 6, 6]},
    ),
    "qwen3-vl": lambda folder: save_qwen3_vl(
        folder, **HEADS, rope_parameters={**TURNING, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    ),
}
NewRunner = Callable[[ModelSource, str], GpuRunner]


def limits_of(config: ModelConfig) -> StepLimits:
    num_axes = 0 if config.mrope is None else 3
    return replace(LIMITS, num_axes=num_axes, num_window_groups=len(config.page_groups) - 1)


def emulated(source: ModelSource, graphs: str) -> GpuRunner:
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
    kv = torch.full(layout.shape, torch.nan)
    options = ModelOptions("float32", attention_backend="torch" if len(source.config.kinds) > 1 else "auto")
    model = load_model(source, kv, options)
    rungs, token_rungs = (ladder(MAX_REQUESTS), TOKEN_RUNGS) if graphs == "on" else ((), ())
    return emulated_runner(
        model, kv, limits_of(source.config), rungs=rungs, token_rungs=token_rungs, recorder=Recorder()
    )


def on_gpu(source: ModelSource, graphs: str) -> GpuRunner:
    from diptych.engine.runner.gpu.new_runner import new_runner

    device = torch.device("cuda:0")
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
    kv = torch.zeros(layout.shape, device=device)
    model = load_model(source, kv, ModelOptions("float32"))
    return new_runner(model, limits_of(source.config), device, with_graphs=graphs == "on")


@pytest.fixture(scope="module", params=SAVED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return SAVED[request.param](tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def source(model: VisionModel) -> ModelSource:
    return open_model(str(model.folder))


@pytest.mark.parametrize(
    ("new_runner", "graphs", "step_tokens"),
    [
        pytest.param(emulated, "on", 7, id="emulated"),
        *(
            pytest.param(on_gpu, graphs, step_tokens, marks=OF_GPU, id=f"graphs-{graphs}-{step_tokens}")
            for graphs in ("off", "on")
            for step_tokens in (64, 7)
        ),
    ],
)
def test_a_prompt_with_two_images_gives_the_logits_and_tokens_of_transformers(
    model: VisionModel, source: ModelSource, new_runner: NewRunner, graphs: str, step_tokens: int
) -> None:
    """And so do requests of text and of images together, some of them in decode steps where others begin."""
    engine = VisionEngine(source, new_runner(source, graphs), step_tokens)
    tokens = model.greedy(TWO_IMAGES, NUM_OUTPUTS)
    assert engine.run(request_of(1, TWO_IMAGES))[1] == tokens
    logits = model.logits([*TWO_IMAGES, *tokens[:-1]])[-NUM_OUTPUTS:]
    torch.testing.assert_close(torch.stack(engine.logits[1]).cpu().float(), logits, atol=1e-3, rtol=1e-4)
    counts = engine.runner.image_counts
    assert counts == ImageCounts(num_encoded=2, num_rows=23)
    prompts = {2: seen(picture(5, 2, 3)), 3: [9, 8, 7, 6, 5], 4: TWO_IMAGES}
    found = engine.run(*(request_of(room, prompt) for room, prompt in prompts.items()))
    assert found == {room: model.greedy(prompt, NUM_OUTPUTS) for room, prompt in prompts.items()}
    assert engine.runner.image_counts.num_encoded == 3, "the same images were encoded twice"
    graphs_used = engine.runner.graph_use.num_graphs
    assert graphs_used > 0 if graphs == "on" else not graphs_used


@pytest.mark.parametrize(
    ("new_runner", "graphs"),
    [
        pytest.param(emulated, "on", id="emulated"),
        *(pytest.param(on_gpu, graphs, marks=OF_GPU, id=f"graphs-{graphs}") for graphs in ("off", "on")),
    ],
)
def test_rows_of_an_image_that_see_each_other_are_computed_between_graphs_of_text(
    gemma3_vision: VisionModel, new_runner: NewRunner, graphs: str
) -> None:
    """Windows of Gemma 3 have pages of their own. Chunks end in front of the second image."""
    source, prompt = open_model(str(gemma3_vision.folder)), seen(picture(0, 4, 4), picture(1, 4, 4))
    engine = VisionEngine(source, new_runner(source, graphs), 37)
    tokens = gemma3_vision.greedy(prompt, NUM_OUTPUTS)
    assert engine.run(request_of(1, prompt))[1] == tokens
    logits = gemma3_vision.logits([*prompt, *tokens[:-1]])[-NUM_OUTPUTS:]
    torch.testing.assert_close(torch.stack(engine.logits[1]).cpu().float(), logits, atol=1e-3, rtol=1e-4)
    prompts = {2: seen(picture(5, 4, 4)), 3: [9, 8, 7, 6, 5], 4: prompt}
    found = engine.run(*(request_of(room, prompt) for room, prompt in prompts.items()))
    assert found == {room: gemma3_vision.greedy(prompt, NUM_OUTPUTS) for room, prompt in prompts.items()}
    assert engine.runner.image_counts.num_encoded == 3


@pytest.mark.parametrize(
    ("new_runner", "graphs"),
    [
        pytest.param(emulated, "on", id="emulated"),
        *(pytest.param(on_gpu, graphs, marks=OF_GPU, id=f"graphs-{graphs}") for graphs in ("off", "on")),
    ],
)
def test_rows_that_clients_gave_are_computed_between_graphs_of_text(
    model: VisionModel, source: ModelSource, new_runner: NewRunner, graphs: str
) -> None:
    rows_model = RowModel(model.folder, model.theirs)
    prompts = {room: rows_like(rows_model, room, 9 + room) for room in (1, 2)}
    engine = VisionEngine(source, new_runner(source, graphs), 7)
    requests = [request_of_rows(room, rows) for room, rows in prompts.items()]
    found = engine.run(*requests, request_of(3, [9, 8, 7, 6, 5]))
    assert found[3] == model.greedy([9, 8, 7, 6, 5], NUM_OUTPUTS)
    assert {room: found[room] for room in prompts} == {
        room: rows_model.greedy(rows, NUM_OUTPUTS) for room, rows in prompts.items()
    }


def test_a_graph_of_text_behind_an_image_reads_the_positions_of_each_step(
    model: VisionModel, source: ModelSource
) -> None:
    """The same graph, first where no image is before: a recording that took its positions would go on with these."""
    engine = VisionEngine(source, emulated(source, "on"))
    for room, prompt in {1: [9, 8, 7, 6, 5], 2: TWO_IMAGES, 3: [5, 6, 7]}.items():
        assert engine.run(request_of(room, prompt))[room] == model.greedy(prompt, NUM_OUTPUTS)


def test_the_largest_and_the_smallest_image_are_encoded_ahead_and_nothing_of_them_is_kept(source: ModelSource) -> None:
    runner, vision = emulated(source, "off"), source.config.vision
    images = runner.model.images
    assert images is not None
    assert vision is not None
    with torch.inference_mode():
        rows = images.encode_extremes(vision)
    assert rows.shape[1] == vision.max_pixels // vision.step**2
    assert images.counts == ImageCounts()
    assert not images._rows


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_engine_of_images_measures_their_memory_and_serves(model: VisionModel) -> None:
    """As a worker starts: measured, warmed up, and text generated."""
    options = EngineOptions(device="cuda", dtype="bfloat16", max_step_tokens=64, max_requests=8, gpu_memory_share=0.3)
    with Engine(str(model.folder), options) as engine:
        found = engine.generate_batch([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(found[0].token_ids) == 4


@pytest.mark.parametrize("new_runner", [emulated, pytest.param(on_gpu, marks=OF_GPU)])
def test_rows_that_one_worker_wrote_to_pages_are_those_that_another_one_reads(
    source: ModelSource, new_runner: NewRunner
) -> None:
    images, content = new_runner(source, "off").model.images, request_of(1, TWO_IMAGES).contents[0]
    assert images is not None
    assert content.image is not None
    pages = np.arange(3, 40, dtype=np.int32)
    device = images._pool.device
    image = ImageRows(b"a", content.image, 2, 5, 7)
    with torch.inference_mode():
        made = images.of_step((image,), device)
        images.write((replace(image, pages=pages),))
        images.forget()
        read = images.of_step((replace(image, pages=pages),), device)
    assert torch.equal(read.rows, made.rows)
    assert images.counts == ImageCounts(num_encoded=1, num_rows=15, num_reused=0, num_pulled=1)
