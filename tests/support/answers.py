"""Whole requests through a small model, by one worker or by a pair: everything that is said of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from stepped_engine import local_core

from diptych.checkpoints.source import open_model
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.stepping import OverlappedStepping, Stepping, SynchronousStepping, TpModelWorkerClient
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.output import Output
from diptych.generation.sampling_params import SamplingParams

VOCAB: Final = 321  # of the tiny model
PAGE_SIZE: Final = 4
NUM_PAGES: Final = 256
STEP_TOKENS: Final = 24  # longer prompts are cut
WAYS: Final = ("one worker", "one worker, overlapped", "a pair")

Asked = Sequence[tuple[list[int], SamplingParams]]
Answers = dict[int, list[Output]]  # by the number of the request, in the order of its tokens
Answer = Callable[..., Answers]  # with `rounds` the same is asked again when all is answered; the last answers count


def model_on(folder: Path, num_pages: int) -> tuple[Any, ModelRunner]:
    """Return a pool, and the runner on it."""
    source = open_model(str(folder))
    layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32")
    kv = np.full(layout.shape, np.nan, np.float32)
    return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32", max_requests=16)


def one_by_one(core: SchedulerCore, runner: Any) -> Stepping:
    return SynchronousStepping(core, runner, lambda: 0.0)


def overlapped(core: SchedulerCore, runner: Any) -> Stepping:
    return OverlappedStepping(core, TpModelWorkerClient(runner), lambda: 0.0)


def alone(
    runner: Any,
    asked: Asked,
    num_prior: int = 0,
    rounds: int = 1,
    new_stepping: Callable[[SchedulerCore, Any], Stepping] = one_by_one,
    eos_ids: frozenset[int] = frozenset(),
    pages_per_state: int = 0,
    **limits: Any,
) -> Answers:
    cache = KvCache(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_requests=16,
        max_tokens_per_request=256,
        pages_per_state=pages_per_state,
    )
    core = local_core(cache, Limits(256, VOCAB, eos_ids, STEP_TOKENS, 16, **limits))
    stepping = new_stepping(core, runner)
    for _ in range(rounds):
        answers: Answers = {room: [] for room in range(len(asked))}
        for room, (prompt, chosen) in enumerate(asked):
            core.handle(Start(new_request(room, np.array(prompt), chosen, num_prior_output_tokens=num_prior)), 0.0)
        while stepping.advance(lambda: None):
            pass
        for effect in core.pop_effects():
            assert isinstance(effect, Emit | EmitTokens)
            for output in effect.outputs() if isinstance(effect, EmitTokens) else [effect.output]:
                answers[output.room].append(output)
    stepping.close()
    assert cache.audit(core.report().holders) == []
    return answers


def answer_in(way: str, new_model: Callable[[int], Any], make_pair: Any, **options: Any) -> Answer:
    """Return who answers in one of `WAYS`; `options` are those of `alone`, and of a pair."""
    if way != "a pair":
        stepping = one_by_one if way == "one worker" else overlapped
        return lambda asked, **how: alone(new_model(NUM_PAGES)[1], asked, new_stepping=stepping, **options, **how)

    def by_pair(asked: Asked, num_prior: int = 0, rounds: int = 1) -> Answers:
        sizes = {"prefill_pages": NUM_PAGES, "decode_pages": NUM_PAGES, "max_step_tokens": STEP_TOKENS}
        pair = make_pair(**sizes, model=new_model, vocab_size=VOCAB, **options)
        first_room = 1
        for first_room in range(1, 1 + rounds * len(asked), len(asked)):
            for room, (prompt, chosen) in enumerate(asked, first_room):
                pair.start_with(chosen, room, prompt, num_prior)
            pair.run()
        pair.assert_clean()
        prefill, decode = pair.prefill.outputs, pair.decode.outputs
        return {
            room - first_room: [output for output in prefill[room] if output.token_ids] + decode[room]
            for room in range(first_room, first_room + len(asked))
        }

    return by_pair


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]
