"""Greedy requests whose answers one engine alone gives before the drill."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.checkpoints.source import open_model
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.options.device_kind import DeviceKind
from diptych.engine.sim.known_answers import KnownAnswers

MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,  # wide enough for steps that take longer than reading their tokens
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
NUM_QUESTIONS: Final = 40
PROMPT_LENS: Final = (3, 30, 100, 300)
COMMON_LENS: Final = (0, 0, 50, 100)  # of the beginning that some prompts share, so that prefixes are cached
ANSWER_LENS: Final = (4, 100, 400)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what one engine alone answers to it."""

    prompt: Sequence[int]
    answer: Sequence[int]


def write_model(folder: Path) -> Path:
    """Describe a tiny model, whose weights everybody makes up alike; return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def make_questions(model: Path, device: DeviceKind, rng: random.Random) -> list[Question]:
    common = _random_tokens(rng, max(COMMON_LENS))
    prompts = [
        common[: rng.choice(COMMON_LENS)] + _random_tokens(rng, rng.choice(PROMPT_LENS)) for _ in range(NUM_QUESTIONS)
    ]
    answers = _foretold(model, prompts) if device == "sim" else _computed(model, prompts)
    lengths = [rng.choice(ANSWER_LENS) for _ in prompts]
    return [Question(prompt, answer[:length]) for prompt, answer, length in zip(prompts, answers, lengths, strict=True)]


def _foretold(model: Path, prompts: Sequence[list[int]]) -> list[Sequence[int]]:
    """What a simulation must say follows from the prompt."""
    known = KnownAnswers(open_model(str(model), "dummy"))
    return [known.tokens(prompt, max(ANSWER_LENS)) for prompt in prompts]


def _computed(model: Path, prompts: Sequence[list[int]]) -> list[Sequence[int]]:
    """Ask one engine alone."""
    params = SamplingParams(max_tokens=max(ANSWER_LENS), temperature=0.0, ignore_eos=True)
    with Engine(str(model), EngineOptions(load_format="dummy", kv_cache_mib=64)) as engine:
        return [output.token_ids for output in engine.generate_batch(prompts, params)]


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]
