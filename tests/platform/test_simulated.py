"""The whole platform without torch: only the model is simulated, and every answer is known."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diptych.engine.sim.known_answers import KnownAnswers

Platform = Any


def test_a_chat_is_answered_as_the_pages_that_arrived_say(simulated: Platform) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "sim", "messages": messages, "max_tokens": 40, "temperature": 0}
    status, answer = simulated.post("/v1/chat/completions", body, headers={"x-diptych-timings": "1"})
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == KnownAnswers().chat(messages, 40)
    assert answer["diptych"]["bytes_moved"] > 0


def test_answers_stay_right_under_load_with_shared_prefixes(simulated: Platform) -> None:
    known, common = KnownAnswers(), "the beginning that all of these share, " * 20
    prompts = [common[: 100 * (number % 8)] + f"and then number {number}" for number in range(48)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda prompt: simulated.complete(prompt, 24)["choices"][0]["text"], prompts))
    assert answers == [known.completion(prompt, 24) for prompt in prompts]
    simulated.assert_clean()


def test_what_is_drawn_depends_on_the_seed_alone(simulated: Platform) -> None:
    drawn = [simulated.complete("once", 16, temperature=1, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_answer_keeps_to_its_schema(simulated: Platform) -> None:
    answer = simulated.complete("a colour", 40, guided_choice=["red", "green"])
    assert answer["choices"][0]["text"] in ("red", "green")


def test_the_model_has_the_names_and_the_context_that_were_asked_for(simulated: Platform) -> None:
    with urllib.request.urlopen(f"{simulated.url}/v1/models", timeout=200) as answer:
        models = json.load(answer)["data"]
    assert [model["id"] for model in models] == ["ours", "org/other"]
    assert {(model["root"], model["max_model_len"]) for model in models} == {("sim", 4000)}
    answers = [simulated.complete("hello", 4, model=name)["model"] for name in ("ours", "org/other", "sim")]
    assert answers == ["ours", "org/other", "sim"]
    assert simulated.complete("x" * 3990, 100)["usage"]["completion_tokens"] == 10
    status, error = simulated.post("/v1/completions", {"prompt": "x" * 4000})
    assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
    assert {worker.context_len for worker in simulated.instances() if worker.context_len} == {4000}
