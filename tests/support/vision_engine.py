"""One worker's core and a tiny model that sees images, stepped by hand; and the prompts that tests give it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from stepped_engine import local_core
from tiny_vision import VISION_END, VISION_START, VOCAB_SIZE, Prompt, contents_of, keys_of, picture

from diptych.checkpoints.source import ModelSource
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.runner.gpu.gpu_runner import GpuRunner
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.kv_regions import window_pages
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step_rows import row_limit, row_width
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.generation.output import Failure
from diptych.generation.sampling_params import SamplingParams

PAGE_SIZE: Final = 4
NUM_PAGES: Final = 128
CONTEXT: Final = 256
NUM_OUTPUTS: Final = 6
GREEDY: Final = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)


def seen(*images: Any, first: int = 1) -> list[Any]:
    """Return a prompt with images between a few tokens."""
    text: list[Any] = [first, 2, 3]
    for number, image in enumerate(images):
        text += [VISION_START, image, VISION_END, 10 + number]
    return [*text, 20, 21]


TWO_IMAGES: Final = seen(picture(0, 3, 5), picture(1, 4, 2))


def runner_of(source: ModelSource, num_pages: int = NUM_PAGES, **options: Any) -> tuple[Any, ModelRunner]:
    """Return a pool, and the model on it."""
    layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
    kv = torch.full(layout.shape, torch.nan)
    return kv.numpy(), ModelRunner(source, kv, dtype="float32", max_requests=16, **options)


def new_cache(num_pages: int = NUM_PAGES, windows: WindowPages = NO_WINDOWS) -> KvCache:
    sizes: dict[str, Any] = {
        "num_pages": num_pages,
        "page_size": PAGE_SIZE,
        "max_requests": 16,
        "max_tokens_per_request": CONTEXT,
    }
    return KvCache(**sizes, windows=windows)


def request_of(
    room: int, prompt: Prompt, params: SamplingParams = GREEDY, *, with_pixels: bool = True, **fields: Any
) -> Request:
    """Return the request of a prompt, as the worker has it that computes it, or that is sent its KV."""
    contents = contents_of(prompt, with_pixels=with_pixels)
    return new_request(room, keys_of(prompt), params, contents=contents, **fields)


class VisionEngine:
    """`batches` are those of the last `run`, and `logits` what it sampled from, by room."""

    def __init__(self, source: ModelSource, runner: ModelRunner | GpuRunner, max_step_tokens: int = 64) -> None:
        self.runner = runner
        self.cache = new_cache(windows=window_pages(source.config, max_step_tokens))
        sees: dict[str, Any] = {"vision": source.config.vision, "row_width": row_width(source.config)}
        sees["row_limit"] = row_limit(source.config, "float32")
        limits = Limits(CONTEXT, VOCAB_SIZE, frozenset(), max_step_tokens, 16, **sees)
        self.core = local_core(self.cache, limits)
        self.batches: list[ForwardBatch] = []
        self.logits: dict[int, list[Any]] = defaultdict(list)
        self.failures: dict[int, Failure] = {}

    def run(
        self, *requests: Request, change: Callable[[ForwardBatch], ForwardBatch] = lambda batch: batch
    ) -> dict[int, list[int]]:
        """Compute requests together; return the tokens of each. `change` is made to each step."""
        for request in requests:
            self.core.handle(Start(request), 0.0)
        tokens: dict[int, list[int]] = defaultdict(list)
        self._collect(tokens)
        self.batches.clear()
        while (batch := self.core.plan(0.0)) is not None:
            batch = change(batch)
            self.batches.append(batch)
            logits = self.runner.logits(batch)
            rooms = [room for room in self.core.rooms_of_step()]
            if len(rooms) == 1 and len(logits):
                self.logits[rooms[0]].append(logits[-1].clone())
            self.core.commit(self.runner.sample(batch, logits, self.core.sampling())(), 0.0)
            self._collect(tokens)
        return dict(tokens)

    def _collect(self, tokens: dict[int, list[int]]) -> None:
        for effect in self.core.pop_effects():
            assert isinstance(effect, Emit | EmitTokens)
            for output in [effect.output] if isinstance(effect, Emit) else effect.outputs():
                tokens[output.room].extend(output.token_ids)
                if output.failure is not None:
                    self.failures[output.room] = output.failure


def without_images(batch: ForwardBatch) -> ForwardBatch:
    """Return a step as a worker would compute it that knows nothing of three axes."""
    return replace(batch, rope_positions=None)
