"""The forward pass against transformers: logits, and greedy text token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.errors import ConfigError
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardMode

NewDriver = Callable[..., Any]
BACKENDS = ["cpu", "torch"]
LENGTHS = [1, 2, 15, 16, 17, 40, 65, 200]


def prompts(vocab_size: int) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def worst(ours: Tensor, theirs: list[Tensor]) -> float:
    return float((ours - torch.stack(theirs)).abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_the_small_model_are_those_of_transformers(
    small_model: ModelSource, small_reference: Any, new_driver: NewDriver, backend: str
) -> None:
    """Whole prompts, prompts in two chunks, and single tokens after them; several requests a step."""
    driver, texts = new_driver(small_model, backend, num_pages=128), prompts(small_model.config.vocab_size)
    expected = [reference_logits(small_reference, text) for text in texts]
    halves = [len(text) // 2 for text in texts]
    assert worst(driver.extend(dict(enumerate(texts))), [logits[-1] for logits in expected]) < 1e-3
    for request in range(len(texts)):
        driver.forget(request)
    long = [i for i, text in enumerate(texts) if len(text) >= 15]
    first = driver.extend({i: texts[i][: halves[i]] for i in long})
    assert worst(first, [expected[i][halves[i] - 1] for i in long]) < 1e-3
    second = driver.extend({i: texts[i][halves[i] : -1] for i in long})
    assert worst(second, [expected[i][-2] for i in long]) < 1e-3
    third = driver.decode({i: texts[i][-1] for i in long})
    assert worst(third, [expected[i][-1] for i in long]) < 1e-3


def test_a_long_prompt_has_the_logits_of_transformers(
    small_model: ModelSource, small_reference: Any, new_driver: NewDriver
) -> None:
    text = np.random.default_rng(2).integers(0, small_model.config.vocab_size, 600).tolist()
    with torch.inference_mode():
        expected = small_reference(torch.tensor([text]), logits_to_keep=1).logits[0]
    driver = new_driver(small_model, num_pages=128)
    driver.extend({0: text[:280]})
    assert worst(driver.extend({0: text[280:]}), list(expected)) < 1e-3


def test_the_small_model_knows_the_capital_of_france(small_model: ModelSource, new_driver: NewDriver) -> None:
    """Wrong tensors, rotations or templates give fluent nonsense at best; this comes from no other implementation."""
    tokenizer, driver = small_model.tokenizer(), new_driver(small_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    token = int(driver.extend({0: tokenizer.encode(tokenizer.apply_chat_template(question))}).argmax())
    answer: list[int] = []
    while token not in tokenizer.eos_ids and len(answer) < 20:
        answer.append(token)
        token = int(driver.decode({0: token}).argmax())
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_bfloat16_is_near_float32(small_model: ModelSource, new_driver: NewDriver) -> None:
    text = small_model.tokenizer().encode("The quick brown fox jumps over the lazy")
    exact = new_driver(small_model).extend({0: text})
    rounded = new_driver(small_model, "auto", "bfloat16").extend({0: text})
    assert rounded.dtype == torch.bfloat16
    assert exact.argmax() == rounded.argmax()
    assert torch.cosine_similarity(exact, rounded.float()) > 0.999


def test_a_request_has_the_same_bits_in_any_batch_and_however_its_prompt_is_cut(
    small_model: ModelSource, new_driver: NewDriver
) -> None:
    driver, texts = new_driver(small_model, num_pages=128), prompts(small_model.config.vocab_size)
    together = driver.extend(dict(enumerate(texts)))
    for i, text in enumerate(texts):
        driver.forget(i)
        chunks = [text[at : at + 33] for at in range(0, len(text), 33)]
        alone = [driver.extend({i: chunk}) for chunk in chunks][-1]
        assert torch.equal(alone[0], together[i])


def test_decode_and_prefill_give_a_token_the_same_bits(small_model: ModelSource, new_driver: NewDriver) -> None:
    """So a request that is replayed elsewhere, output and all as one prompt, cannot take another turn."""
    driver, texts = new_driver(small_model, num_pages=128), prompts(small_model.config.vocab_size)
    tokens, outputs = driver.extend(dict(enumerate(texts))).argmax(-1).tolist(), []
    for _ in range(20):
        outputs.append(tokens)
        decoded = driver.decode(dict(enumerate(tokens)))
        tokens = decoded.argmax(-1).tolist()
    for i, text in enumerate(texts):
        driver.forget(i)
        replayed = driver.extend({i: text + [step[i] for step in outputs]})
        assert torch.equal(replayed[0], decoded[i])


def tiny_model(folder: Path, head_dim: int = 64) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.eval()


def test_a_step_that_samples_from_nobody_still_writes_its_kv(new_driver: NewDriver, tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    text = prompts(200)[-1]
    for backend in BACKENDS:
        driver = new_driver(open_model(str(tmp_path)), backend)
        batch = driver.batch(ForwardMode.EXTEND, {0: text[:50]})
        nobody = type(batch)(**{**fields(batch), "num_sampled": np.zeros(1, np.int64)})
        assert driver.runner.execute(nobody, driver.greedy(0)).token_ids.tolist() == []
        assert worst(driver.extend({0: text[50:]}), [reference_logits(model, text)[-1]]) < 1e-3


def fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float32", "attention_backend": "flash"}, "flash"),
        ({"dtype": "bfloat16", "attention_backend": "cpu"}, "use 'torch'"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    tiny_model(tmp_path)
    source = open_model(str(tmp_path))
    kv = torch.zeros(2, 3, 2, 16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=named):
        ModelRunner(source, kv, **options)


@pytest.mark.integration
def test_without_a_compiler_torch_computes_and_says_so(
    new_driver: NewDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from diptych.kernels.cpu import library

    model = tiny_model(tmp_path)
    monkeypatch.setenv("CC", "/bin/false")
    library.load.cache_clear()
    driver = new_driver(open_model(str(tmp_path)), "auto")
    library.load.cache_clear()
    assert "torch computes instead" in caplog.text
    assert worst(driver.extend({0: [1, 2, 3]}), [reference_logits(model, [1, 2, 3])[-1]]) < 1e-3


def test_weights_that_stay_quantised_give_the_bits_of_dequantised_ones(
    small_model: ModelSource, new_driver: NewDriver
) -> None:
    kept, expanded = new_driver(small_model), new_driver(small_model, quantization="none")
    tokens = prompts(small_model.config.vocab_size)
    for chunks in (dict(enumerate(tokens)), {0: tokens[-1][:3]}):
        assert torch.equal(kept.extend(chunks), expanded.extend(chunks))
    assert torch.equal(kept.decode({row: row for row in range(8)}), expanded.decode({row: row for row in range(8)}))
    assert torch.equal(kept.decode({5: 7}), expanded.decode({5: 7}))


def test_heads_too_large_for_the_kernels_are_computed_by_torch(
    new_driver: NewDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(tmp_path, head_dim=1032)
    driver = new_driver(open_model(str(tmp_path)), "auto")
    assert "torch computes instead" in caplog.text
    assert "no heads of 1032" in caplog.text
    assert worst(driver.extend({0: [1, 2, 3]}), [reference_logits(model, [1, 2, 3])[-1]]) < 1e-3
