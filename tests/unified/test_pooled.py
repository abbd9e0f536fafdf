"""Legs of which no text is made, on a real model in a worker's core: against transformers, chunked, beside others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pooling_engine import PoolingEngine

from diptych.checkpoints.source import open_model
from diptych.common.members.roles import LegKind, Role
from diptych.generation.finish import Finish
from diptych.generation.output import FailureCode
from diptych.v1.inference_pb2 import SamplingParams
from diptych.v1.worker_pb2 import StartLeg

CONTEXT = 128
SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
PROMPTS = [[1 + (7 * i + 11 * n) % 130 for i in range(length)] for n, length in enumerate((50, 3, 17, CONTEXT))]
FleetClass = Any  # the fixture's class: test helpers can't be imported


def saved(folder: Path, kind: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    model = getattr(transformers, kind)(transformers.Qwen3Config(**SHAPE, **settings)).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    saved(folder, "Qwen3Model")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The last token's state of each prompt."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in PROMPTS]


def leg(room: int, prompt: Sequence[int], **fields: Any) -> StartLeg:
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=1.0)
    return StartLeg(room=room, kind=LegKind.POOL.wire, prompt_token_ids=prompt, sampling=sampling, **fields)


def cosine(one: Any, other: Any) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_prompts_in_chunks_beside_others_have_the_vectors_of_auto_model(folder: Path, expected: Any) -> None:
    engine = PoolingEngine(open_model(str(folder)), max_step_tokens=32)
    found = engine.run([leg(room, prompt) for room, prompt in enumerate(PROMPTS, 1)])
    assert engine.num_steps > 4, "the longest is as long as four steps"
    assert [found[room].finish for room in found] == [Finish.LENGTH] * 4
    assert min(cosine(found[room].vector, theirs) for room, theirs in enumerate(expected, 1)) >= 0.99999


def test_a_prefix_that_is_cached_is_not_computed_again_and_the_vector_is_the_same(folder: Path, expected: Any) -> None:
    engine = PoolingEngine(open_model(str(folder)))
    engine.run([leg(1, PROMPTS[0][:33])])
    (found,) = engine.run([leg(2, PROMPTS[0])]).values()
    assert found.stats is not None
    assert found.stats.cached_tokens == 32
    assert cosine(found.vector, expected[0]) >= 0.99999


def test_a_mean_is_of_all_tokens_so_nothing_is_reused_and_a_prompt_is_one_step(folder: Path, tmp_path: Path) -> None:
    model = saved(tmp_path, "Qwen3Model")
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    engine = PoolingEngine(open_model(str(tmp_path)), max_step_tokens=60)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0).numpy() for prompt in PROMPTS]
    for _ in range(2):
        found = engine.run([leg(room, prompt) for room, prompt in enumerate(PROMPTS, 1)])
        assert min(cosine(found[room].vector, expected[room - 1]) for room in (1, 2, 3)) >= 0.99999
        assert [found[room].stats.cached_tokens for room in (1, 2, 3)] == [0, 0, 0]  # type: ignore[union-attr]
        assert found[4].failure is not None
        assert "sees a prompt as a whole: a step of this worker computes 6" in found[4].failure.message


def test_each_model_refuses_what_it_does_not_make(folder: Path, tmp_path: Path) -> None:
    engine = PoolingEngine(open_model(str(folder)))
    text = leg(1, PROMPTS[1])
    text.kind = LegKind.PREFILL.wire
    (found,) = engine.run([text]).values()
    assert found.failure is not None
    assert (found.failure.code, found.failure.message) == (FailureCode.INVALID, "this model makes no text")
    (found,) = engine.run([leg(1, PROMPTS[1], label_token_ids=[3])]).values()
    assert found.failure is not None
    assert "no token has a probability" in found.failure.message
    saved(tmp_path, "Qwen3ForCausalLM")
    engine = PoolingEngine(open_model(str(tmp_path)))
    (found,) = engine.run([leg(1, PROMPTS[1])]).values()
    assert found.failure is not None
    assert "needs labels" in found.failure.message
    (found,) = engine.run([leg(1, PROMPTS[1], label_token_ids=[131])]).values()
    assert found.failure is not None
    assert "outside the vocabulary of 131" in found.failure.message


def test_labels_have_the_log_probabilities_of_the_next_token(tmp_path: Path) -> None:
    model = saved(tmp_path, "Qwen3ForCausalLM")
    engine = PoolingEngine(open_model(str(tmp_path)))
    found = engine.run([leg(1, PROMPTS[0], label_token_ids=[5, 9]), leg(2, PROMPTS[1], label_token_ids=[7])])
    for room, (prompt, labels) in enumerate(((PROMPTS[0], [5, 9]), (PROMPTS[1], [7])), 1):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)[labels]
        np.testing.assert_allclose(np.asarray(found[room].vector), theirs.numpy(), atol=1e-4)


def test_vectors_beside_text_are_work_for_idle_time(fleet_class: FleetClass) -> None:
    """Prompts that came later, and want text, have their first tokens before them, whosever they are."""
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, num_pages=400)
    for room in range(1, 5):
        prompt = [room * 50 + i for i in range(30)]
        fleet.start_leg(1, room, prompt, LegKind.POOL, 0, max_tokens=1, labels=(1,))
    fleet.advance(1)
    for room, decode in ((5, 1), (6, 2)):  # one is served alone here, of the other the prompt only
        fleet.start(room, [room * 50 + i for i in range(30)], 1, decode, max_tokens=2)
    fleet.run()
    assert set(list(fleet.workers[1].outputs)[:3]) == {1, 5, 6}, "no more than the prompt that was part-way comes first"
    assert sorted(fleet.workers[1].outputs) == list(range(1, 7))
    fleet.close()
