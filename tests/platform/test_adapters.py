"""Adapters on a platform of two prefill ranks and one of decode, at start and at run time, beside other requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

Platform = Any
MAX_TOKENS = 10
PROMPTS = [[first, *range(30 + 9 * first)] for first in range(6)]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Folders:
    """Adapters of the tiny model, and what transformers generates with each."""

    def __init__(self, root: Path, base: Path, write_adapter: Callable[..., Mapping[str, Any]]) -> None:
        self.root = root
        self.outputs: dict[str, list[list[int]]] = {}
        for name in ("", "ada", "bob"):
            model: Any = transformers.LlamaForCausalLM.from_pretrained(base)
            if name:
                shapes = {n: tuple(m.weight.shape) for n, m in model.named_modules() if n.endswith(LINEAR)}
                for module, delta in write_adapter(root / name, shapes, seed=len(self.outputs)).items():
                    model.get_submodule(module).weight.data += delta
            self.outputs[name] = [greedy(model, prompt) for prompt in PROMPTS]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def folders(tmp_path: Path, tiny_folder: Path, write_adapter: Callable[..., Mapping[str, Any]]) -> Folders:
    return Folders(tmp_path / "adapters", tiny_folder, write_adapter)


@pytest.fixture
def platform(
    start_platform: Callable[..., Platform], tiny_folder: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Platform]:
    monkeypatch.setenv("DIPTYCH_KV_CACHE_MIB", "8")
    monkeypatch.setenv("DIPTYCH_MAX_STEP_TOKENS", "32")
    monkeypatch.setenv("DIPTYCH_LORA", f"ada={folders.root / 'ada'}")
    monkeypatch.setenv("DIPTYCH_RUNTIME_LORA", "1")
    options = ("--model", str(tiny_folder), "--threads", "1", "--prefill-options", "--tp 2")
    running = start_platform(options=options)
    yield running
    running.assert_clean()


def complete(platform: Platform, model: str, prompt: list[int]) -> tuple[list[int], Any]:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer = platform.post("/v1/completions", body | {"model": model}, headers={"x-diptych-timings": "1"})
    assert status == 200, answer
    assert answer["model"] == (model or platform.model_id())
    return answer["choices"][0]["token_ids"], answer["diptych"]


def complete_all(platform: Platform, models: list[str]) -> list[list[int]]:
    with ThreadPoolExecutor(len(models)) as pool:
        return [tokens for tokens, _ in pool.map(lambda m, p: complete(platform, m, p), models, PROMPTS)]


@pytest.fixture
def background(platform: Platform, folders: Folders) -> Iterator[list[list[int]]]:
    """Requests for the model that run all the time; their outputs."""
    done, outputs = threading.Event(), []

    def run() -> None:
        while not done.is_set():
            outputs.append(complete(platform, "", PROMPTS[0])[0])

    thread = threading.Thread(target=run)
    thread.start()
    yield outputs
    done.set()
    thread.join()


def test_adapters_at_start_and_at_run_time_give_the_tokens_of_merged_weights(
    platform: Platform, folders: Folders, background: list[list[int]], wait_until: Callable[..., Any]
) -> None:
    models = ["ada", "", "ada", "", "ada", ""]
    assert complete_all(platform, models) == [folders.outputs[model][i] for i, model in enumerate(models)]

    load = {"lora_name": "bob", "lora_path": str(folders.root / "bob")}
    assert platform.post(LOAD, load) == (200, {"lora_name": "bob", "num_workers": 2})
    models = ["ada", "", "bob", "ada", "bob", ""]
    assert complete_all(platform, models) == [folders.outputs[model][i] for i, model in enumerate(models)]

    prompt = list(range(200, 264))  # each model computes it once
    cached = [complete(platform, model, prompt)[1] for model in ("", "ada", "", "ada")]
    assert [each["prefill_cached_tokens"] for each in cached] == [0, 0, 64, 64]
    assert [each["decode_cached_tokens"] for each in cached] == [0, 0, 48, 48]

    assert platform.post(UNLOAD, {"lora_name": "bob"})[0] == 200
    assert platform.post("/v1/completions", {"model": "bob", "prompt": "w1"})[0] == 404
    load = {"lora_name": "bob", "lora_path": str(folders.root / "ada")}
    assert platform.post(LOAD, load)[0] == 200
    assert complete(platform, "bob", PROMPTS[2])[0] == folders.outputs["ada"][2]

    status, answer = platform.post(LOAD, {"lora_name": "carl", "lora_path": str(folders.root / "nowhere")})
    assert status == 400
    assert "nowhere" in answer["error"]["message"]
    wait_until(lambda: len(background) > 3, 200.0, "outputs beside all that")
    assert all(output == folders.outputs[""][0] for output in background)
