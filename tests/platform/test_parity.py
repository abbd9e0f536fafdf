"""Greedy output through router, prefill and decode equals the embedded engine's and transformers', token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from diptych.checkpoints.quantization.weight import expanded
from diptych.checkpoints.source import open_model
from diptych.engine import Engine, EngineOptions, SamplingParams

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 8
PAGE = 16
CHUNK = 512
Platform = Any  # the fixture's class: test helpers can't be imported

LENGTHS = [1, 2, 5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 63, 64, 65]
LONG_LENGTHS = [257, CHUNK, 2 * CHUNK + 1]
LONG = len(LENGTHS) + 1  # the prompt of a whole chunk
TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "La vie est belle, mais",
    "日本の首都は",
    "Привет, как дела?",
    "🙂🙃 emoji and ümläuts: naïve café",
    "العربية لغة",
    "\r\n\tTabs\tand\r\nline ends ",
    "a",
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is water wet?"}],
    [
        {"role": "user", "content": "My name is Zoë."},
        {"role": "assistant", "content": "Hello Zoë!"},
        {"role": "user", "content": "What is my name? 你好"},
    ],
    [{"role": "user", "content": "Count to five."}],
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Token ids, 1 to 1,025 long; the last few share prefixes with earlier ones."""
    tokenizer = open_model("smollm2").tokenizer()
    rng = np.random.default_rng(7)
    text = tokenizer.encode("It was a bright cold day in April, and the clocks were striking thirteen. " * 200)
    made = [text[:n] for n in LENGTHS]
    made += [rng.integers(100, 40_000, n).tolist() for n in LONG_LENGTHS]
    made += [tokenizer.encode(one) for one in TEXTS]
    made += [tokenizer.encode(tokenizer.apply_chat_template(chat)) for chat in CHATS]
    made += [made[-1] + tokenizer.encode(" and then to ten"), made[LONG][:300] + text[:40], text[:400]]
    return made


def pages_counted(platform: Platform) -> tuple[int, int]:
    """Pages that workers sent, and pages that they received and verified, since they started."""
    platform.assert_clean()
    statuses = platform.statuses()
    return sum(status.pages_sent for status in statuses), sum(status.pages_received for status in statuses)


@pytest.fixture(scope="module")
def counted_before(platform: Platform) -> tuple[int, int]:
    return pages_counted(platform)


@pytest.fixture(scope="module")
def answers(platform: Platform, prompts: list[list[int]], counted_before: tuple[int, int]) -> list[Any]:
    """What the platform says, 16 requests at a time."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda ids: platform.complete(ids, NUM_TOKENS, return_token_ids=True), prompts))


def output_ids(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_tokens_equal_the_embedded_engines(prompts: list[list[int]], answers: list[Any]) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    with Engine("smollm2", EngineOptions(kv_cache_mib=512, num_threads=2)) as engine:
        generations = engine.generate_batch(prompts, params)
    assert [output_ids(answer) for answer in answers] == [list(g.token_ids) for g in generations]
    assert [answer["choices"][0]["text"] for answer in answers] == [g.text for g in generations]


def test_tokens_equal_transformers_greedy_choice(prompts: list[list[int]], answers: list[Any]) -> None:
    """One forward over prompt and output: each output token must be the argmax after the tokens before it."""
    model = reference_model()
    for prompt, answer in zip(prompts, answers, strict=True):
        output = output_ids(answer)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
        assert logits.argmax(-1).tolist() == output, f"prompt of {len(prompt)} tokens"


def test_every_request_moved_its_pages_and_both_sides_agree_on_the_bytes(
    prompts: list[list[int]], answers: list[Any]
) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = answer["diptych"]
        wanted = -(-len(prompt) // PAGE) - seen["decode_cached_tokens"] // PAGE
        assert seen["prefill_pages_moved"] == seen["pages_moved"] == wanted >= 1
        assert seen["prefill_bytes_moved"] == seen["bytes_moved"] > 0
        assert seen["whole"], seen
        assert seen["prefill_kv_digest"] == seen["decode_kv_digest"]


def test_the_workers_own_counters_agree_and_everything_is_given_back(
    platform: Platform, answers: list[Any], counted_before: tuple[int, int]
) -> None:
    moved = sum(answer["diptych"]["pages_moved"] for answer in answers)
    sent, received = pages_counted(platform)
    assert (sent - counted_before[0], received - counted_before[1]) == (moved, moved)


def test_workers_have_the_sizes_of_a_cpu_where_nobody_gives_any_and_say_so(platform: Platform) -> None:
    assert {(status.max_requests, status.max_step_tokens) for status in platform.statuses()} == {(64, 512)}
    words = "serving up to 64 requests at once, 512 prompt tokens a step (usual on CPUs); --max-requests"
    assert words in platform.log.read_text()


def test_prefix_hits_are_used_and_reported(platform: Platform, prompts: list[list[int]]) -> None:
    prompt = prompts[LONG]
    first = platform.complete(prompt, 4, return_token_ids=True)
    again = platform.complete(prompt, 4, return_token_ids=True)
    assert output_ids(first) == output_ids(again)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(prompt) // PAGE * PAGE
    assert again["diptych"]["pages_moved"] == 1


def reference_model() -> Any:
    """transformers' Llama with our weights, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = open_model("smollm2")
    c = source.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.ffn_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.context_len,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tie_embeddings,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    weights = {name: torch.from_numpy(tensor) for name, tensor in expanded(source.tensors())}
    missing = model.load_state_dict(weights, strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys in ([], ["lm_head.weight"])
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config)
    return model
