"""The embedded engine with the small model: a real scheduler process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.frontend.scheduler_client import SchedulerDied
from diptych.engine.options.config import KvWindows
from diptych.generation.finish import Finish

SIMULATED = EngineOptions(device="sim", sim_timing=("step=5000",), kv_cache_mib=4)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("smollm2", EngineOptions(kv_cache_mib=128, max_step_tokens=64)) as engine:
        yield engine


def test_a_chat_prompt_is_answered(engine: Engine) -> None:
    prompt = engine.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    answer = engine.generate(prompt, GREEDY)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish is Finish.STOP


def test_a_text_begins_with_the_token_that_the_model_wants_there(tiny_folder: Path, tmp_path: Path) -> None:
    """As the router does, for completions."""
    folder = shutil.copytree(tiny_folder, tmp_path / "with-bos")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="w7 $A", special_tokens=[("w7", 7)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with Engine(str(folder), SIMULATED) as engine:
        answer = engine.generate("w5 w6", GREEDY)
        assert (answer.prompt_tokens, answer.token_ids) == (3, engine.generate([7, 5, 6], GREEDY).token_ids)


def test_streamed_text_equals_the_whole(engine: Engine) -> None:
    whole = engine.generate("Once upon a time", GREEDY)
    deltas = list(engine.stream("Once upon a time", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish for delta in deltas if delta.finish] == [whole.finish]


def test_a_batch_gives_what_each_prompt_gives_alone(engine: Engine) -> None:
    prompts = ["One two three", "La vie est", "def f(x):", "The sun"] * 3
    alone = {prompt: engine.generate(prompt, GREEDY).text for prompt in set(prompts)}
    assert [g.text for g in engine.generate_batch(prompts, GREEDY)] == [alone[prompt] for prompt in prompts]


def test_a_seed_gives_the_same_text_alone_and_in_company(engine: Engine) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, top_k=50, seed=1234)
    alone = engine.generate("My favourite", params).text
    company = engine.generate_batch(["My favourite", "Another prompt", "My favourite"], params)
    assert (company[0].text, company[2].text) == (alone, alone)


def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=(" 8", "\n\n"))
    answer = engine.generate("1, 2, 3, 4, 5,", params)
    assert answer.text.endswith("7,")
    assert answer.finish is Finish.STOP


def test_a_prompt_is_scored_from_a_place_on_with_what_is_before_it_cached(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("Whoever reads this twice has read it before. " * 30)
    start = len(prompt) - 20
    whole = engine.generate(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=1))
    tail = engine.generate(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=start))
    assert whole.prompt_logprobs is not None
    assert tail.prompt_logprobs is not None
    assert (whole.cached_tokens, tail.cached_tokens) == (0, start // 16 * 16)
    expected = whole.prompt_logprobs.span(start, len(prompt) - 1)
    assert tail.prompt_logprobs.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert tail.prompt_logprobs.top_ids == expected.top_ids


def test_a_long_prompt_is_chunked_and_its_prefix_cached(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("All work and no play makes Jack a dull boy. " * 30)
    first, second = (engine.generate(prompt, GREEDY) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)


def test_a_stream_that_is_left_is_aborted_and_the_next_request_works(engine: Engine) -> None:
    stream = engine.stream("Once", SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True))
    next(stream)
    stream.close()
    assert engine.generate("The capital of France is", GREEDY).text.startswith(" Paris")


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], GREEDY, "empty"),
        ([10**6], GREEDY, "vocabulary"),
        ([7, -1], GREEDY, r"prompt\[1\] is below 0"),
        ([[0.5] * 8], GREEDY, r"prompt\[0\] is a list"),
        ("word " * 9000, GREEDY, "tokens"),
        ("hi", SamplingParams(temperature=-1.0), "temperature"),
    ],
)
def test_bad_input_is_refused_in_words(engine: Engine, prompt: Any, params: SamplingParams, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        engine.generate(prompt, params)


def test_a_model_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no model"):
        Engine("no/such/model")


def test_options_that_cannot_work_end_in_words() -> None:
    with pytest.raises(SchedulerDied, match="kv-cache-mib"):
        Engine("sim", replace(SIMULATED, kv_cache_mib=1, page_size=4096))


def test_a_killed_scheduler_fails_requests_instead_of_hanging() -> None:
    with Engine("sim", SIMULATED) as engine:
        stream = engine.stream("Once", SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True))
        next(stream)
        psutil.Process(engine.scheduler_pids[0]).kill()
        with pytest.raises(SchedulerDied):
            list(stream)
        with pytest.raises(SchedulerDied):
            engine.generate("hi", GREEDY)


def test_a_configuration_alone_is_served_with_weights_made_up(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    with Engine(str(tmp_path), EngineOptions(load_format="dummy", kv_cache_mib=4)) as engine:
        first, again = engine.generate([5, 6, 7], GREEDY), engine.generate("5 6 7", GREEDY)
        assert first.token_ids == again.token_ids
        assert first.text == " ".join(map(str, first.token_ids))
        assert len(first.token_ids) == 12


def test_kv_that_no_window_sees_is_given_away_and_changes_no_token(tmp_path: Path) -> None:
    """Prompts of several windows are cut, handed over and found in the cache, in a pool that holds few of them."""
    windowed = GEMMA | {"num_hidden_layers": 7, "sliding_window_pattern": 3, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(windowed))
    options = EngineOptions(load_format="dummy", kv_cache_mib=1, page_size=8, max_step_tokens=32)
    prompts = [[5, 6, 7] * 20, [9, 8] * 70, [3] * 5, [5, 6, 7] * 20 + [1]]
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=7, ignore_eos=True, logprobs=0)
    answers = []
    ways: tuple[tuple[KvWindows, int], ...] = (("keep", 0), ("free", 1))
    for kv_windows, num_each in ways:
        told = replace(options, kv_windows=kv_windows)
        with Engine(str(tmp_path), told, prefill=num_each, decode=num_each) as engine:
            found = [each for _ in range(2) for each in engine.generate_batch(prompts, params)]
        answers.append([(each.token_ids, each.logprobs and each.logprobs.logprobs) for each in found])
    assert answers[0] == answers[1]


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}
