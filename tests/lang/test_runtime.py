"""Programs with an engine of their own: a tiny model, a real scheduler process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych import lang
from diptych.engine import EngineOptions, SamplingParams

pytestmark = pytest.mark.integration

WORDS = " ".join(f"w{number}" for number in range(7, 47))
CHOICES = ["w3 w4", "w5", "w6 w7 w8"]


@pytest.fixture(scope="module")
def runtime(tiny_folder: Path) -> Iterator[Any]:
    with lang.Runtime(str(tiny_folder), EngineOptions(kv_cache_mib=4)) as runtime:
        yield runtime


@lang.function
def program(s: Any) -> None:
    s += WORDS
    s += lang.gen("first", max_tokens=8)
    s += " w9" + lang.gen("second", max_tokens=4, ignore_eos=True)
    s += lang.select("choice", CHOICES)


def test_each_output_goes_on_behind_the_tokens_before_it_whose_kv_is_found_again(runtime: Any) -> None:
    state = program.run(backend=runtime, temperature=0.0)
    first = state.get_meta_info("first")
    assert first["prompt_tokens"] == 40
    prompt = runtime.encode(WORDS, is_first=True)
    made = runtime.generate(prompt, SamplingParams(max_tokens=8, temperature=0.0))
    assert state["first"] == made.text
    behind = [*prompt, *made.token_ids, *runtime.encode(" w9", is_first=False)]
    again = runtime.generate(behind, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert state["second"] == again.text
    assert state.get_meta_info("second")["cached_tokens"] >= 32
    assert state.get_meta_info("second")["prompt_tokens"] == len(behind)


def test_a_choice_is_the_one_whose_tokens_are_likeliest(runtime: Any) -> None:
    prompt = runtime.encode(WORDS, is_first=True)
    means = []
    for choice in CHOICES:
        ids = runtime.encode(choice, is_first=False)
        whole = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        told = runtime._engine.generate([*prompt, *ids], whole).prompt_logprobs.logprobs[-len(ids) :]
        means.append(sum(told) / len(told))

    @lang.function
    def choose(s: Any) -> None:
        s += WORDS + lang.select("choice", CHOICES)

    state = choose.run(backend=runtime)
    assert state["choice"] == CHOICES[means.index(max(means))]
    assert state.get_meta_info("choice")["normalized_prompt_logprobs"] == pytest.approx(means, abs=1e-4)


def test_a_stream_says_what_a_run_says(runtime: Any) -> None:
    whole = program.run(backend=runtime, temperature=0.0)
    state = program.run(backend=runtime, temperature=0.0, stream=True)
    assert "".join(state.text_iter()) == whole.text()
    assert state["second"] == whole["second"]


def test_what_the_engine_refuses_is_said(runtime: Any) -> None:
    with pytest.raises(lang.ProgramError, match="context"):
        lang.function(lambda s: s.__iadd__("w1 " * 5000 + lang.gen("a"))).run(backend=runtime)
