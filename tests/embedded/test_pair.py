"""Embedded engines whose prefill and decode are schedulers of their own, between which KV moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from safetensors.numpy import load_file

from diptych.common.arrays import F32
from diptych.common.errors import ConfigError, DiptychError, InvalidRequest
from diptych.embedded import engine as engine_module
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.generation.embed_rows import checked_rows
from diptych.router.errors import AttemptsFailed

OPTIONS = EngineOptions(kv_cache_mib=4, max_step_tokens=32)
SIMULATED = EngineOptions(device="sim", sim_timing=("step=5000",), kv_cache_mib=4)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
MEASURED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
ENDLESS = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
PROMPTS = [[first, 5, 7, *range(11 * first)] for first in range(10)]  # some are chunked


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Iterator[Engine]:
    with Engine(str(tiny_folder), OPTIONS, prefill=1, decode=1) as engine:
        yield engine


def test_a_pair_gives_what_one_scheduler_gives(
    tiny_folder: Path, reference: Callable[..., Engine], pair: Engine
) -> None:
    expected = reference(tiny_folder).generate_batch(PROMPTS, MEASURED)
    made = pair.generate_batch(PROMPTS, MEASURED)
    assert [each.token_ids for each in made] == [each.token_ids for each in expected]
    for one, other in zip(made, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.logprobs == pytest.approx(other.logprobs.logprobs, abs=1e-4)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    assert len(pair.scheduler_pids) == 2


def test_hidden_states_of_both_halves_predict_the_tokens(tiny_folder: Path, pair: Engine) -> None:
    head = load_file(tiny_folder / "model.safetensors")["lm_head.weight"]
    answer = pair.generate(PROMPTS[3], replace(GREEDY, hidden_states=True))
    assert answer.hidden_states is not None
    assert (head @ np.array(answer.hidden_states.rows(), np.float32).T).argmax(axis=0).tolist() == [*answer.token_ids]


def test_rows_that_tokens_have_give_what_the_tokens_give_and_are_found_again(tiny_folder: Path, pair: Engine) -> None:
    table = load_file(tiny_folder / "model.safetensors")["model.embed_tokens.weight"]
    prompt = [9, 8, *range(200, 240)]
    said = pair.generate(prompt, GREEDY)
    first, again = (pair.generate(table[prompt], GREEDY) for _ in range(2))
    assert first.token_ids == again.token_ids == said.token_ids
    assert (first.prompt_tokens, first.cached_tokens, again.cached_tokens) == (42, 0, 32)
    assert pair.generate(table[prompt[:37]], GREEDY).cached_tokens == 32
    with pytest.raises(InvalidRequest, match=r"a row of input_embeds has 64 numbers, .* not 32"):
        pair.generate(table[prompt][:, :32], GREEDY)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_an_array_of_whole_numbers_is_tokens(pair: Engine, dtype: type[np.integer]) -> None:
    assert pair.generate(np.array(PROMPTS[3], dtype), GREEDY).token_ids == pair.generate(PROMPTS[3], GREEDY).token_ids


def test_rows_are_read_in_threads_once_their_number_is_known(pair: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def read(rows: npt.NDArray[np.floating]) -> F32:
        threads.append(threading.current_thread().name.partition("_")[0])
        return checked_rows(rows)

    monkeypatch.setattr(engine_module, "checked_rows", read)
    monkeypatch.setattr(engine_module, "MAX_ROW_BYTES", 4 * 64 * 9)
    for rows, words in (
        (np.ones((pair.context_len, 64), np.float32), "more than the context"),
        (np.ones((10, 64), np.float16), "take 2560 bytes as float32: give 2304 at most"),
        (np.ones((2, 3, 64), np.float32), "give floats, "),
        (np.ones((2, 64), np.int64), "give floats, "),
        (np.ones(64, bool), "give floats, "),
    ):
        with pytest.raises(InvalidRequest, match=words):
            pair.generate(rows, GREEDY)
    assert not threads
    pair.generate(np.ones((9, 64), np.float64), GREEDY)
    assert threads == ["tokenize"]


def test_rows_are_refused_where_a_draft_model_would_see_none_and_tokens_are_not(tiny_folder: Path) -> None:
    with Engine(str(tiny_folder), replace(OPTIONS, speculate=f"draft:{tiny_folder}")) as engine:
        with pytest.raises(InvalidRequest, match="guessed for by a model that would see no rows; send text or tokens"):
            engine.generate(np.ones((9, 64), np.float32), GREEDY)
        assert len(engine.generate(PROMPTS[3], GREEDY).token_ids) == 8


@pytest.mark.parametrize("tensor", [torch.ones(2, 64), torch.tensor([1, 2])])
def test_tensors_are_refused_in_words(pair: Engine, tensor: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"not a Tensor: give rows as tensor.float\(\).cpu\(\).numpy\(\)"):
        pair.generate(tensor, GREEDY)


def test_a_prefix_that_prefill_has_computed_is_cached_there(pair: Engine) -> None:
    prompt = list(range(100, 150))
    assert [pair.generate(prompt, GREEDY).cached_tokens for _ in range(2)] == [0, 48]


def test_a_streams_tokens_come_from_both_halves_in_order(pair: Engine) -> None:
    whole = pair.generate(PROMPTS[3], GREEDY)
    deltas = list(pair.stream(PROMPTS[3], GREEDY))
    assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == whole.token_ids
    stream = pair.stream(PROMPTS[3], ENDLESS)
    next(stream)
    stream.close()
    assert pair.generate(PROMPTS[3], GREEDY).token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("numbers", "dp", "words"),
    [((1, 0), 1, "or neither"), ((0, 1), 1, "or neither"), ((1, -1), 1, "or neither"), ((1, 1), 2, "dp is for")],
)
def test_numbers_that_make_no_pair_are_refused(numbers: tuple[int, int], dp: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine("sim", EngineOptions(device="sim", dp=dp), prefill=numbers[0], decode=numbers[1])


def test_a_policy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dispatch must be one of .*least_load.*, not 'shortest_queue'"):
        Engine("sim", SIMULATED, dispatch="shortest_queue")


def test_pairs_take_turns_and_one_that_lost_its_half_serves_no_more() -> None:
    """One of two prefill schedulers dies: the other serves on, until the only decode scheduler dies too."""
    with Engine("sim", SIMULATED, prefill=2, decode=1, dispatch="round_robin") as engine:
        prompt = list(range(50))
        assert [engine.generate(prompt, GREEDY).cached_tokens for _ in range(4)] == [0, 0, 48, 48]
        psutil.Process(engine.scheduler_pids[0]).kill()
        made: list[int] = []
        while len(made) < 4:
            with suppress(DiptychError):  # of one that was given to who has just died
                made.append(engine.generate(prompt, GREEDY).cached_tokens)
        assert made == [48] * 4
        stream = engine.stream(prompt, ENDLESS)
        next(stream)
        psutil.Process(engine.scheduler_pids[2]).kill()
        with pytest.raises(DiptychError, match=r"ended with code -9|lost the link to the decode worker"):
            list(stream)  # its peer may notice first
        with pytest.raises(SchedulerDied, match="ended with code -9"):
            ask_on(engine, prompt)


def ask_on(engine: Engine, prompt: list[int]) -> NoReturn:
    """Ask until the engine is known to have ended; until then attempts fail by their links."""
    while True:
        with suppress(AttemptsFailed):
            engine.generate(prompt, GREEDY)
