"""Every model family by kernels of GPUs against transformers; in the interpreter, the start of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.engine.attention import decompression, latent_prompts

LARGE4 = "mistral large 4 with images, layers that share a choice, or latents, or both; groups"
NewDriver = Callable[..., Any]
INTERPRETED = {  # and which prompts: what is computed beside others, kernels' own tests say
    "gemma3": slice(1, 2),  # norms before, after and of heads, windows, two embeddings of positions
    "gpt oss": slice(1, 2),  # sinks, experts with biases
    "deepseek v3": slice(1, 2),  # latents
    "gemma4, borrowed keys, wide networks, inputs of each layer": slice(1, 2),  # two kinds of layers, queries alone
    "glm moe dsa, layers that share a choice": slice(3, 4),  # an indexer, and prompts of more tokens than it keeps
    LARGE4: slice(5, 6),  # layers that borrow latents, some of them choose; still ones; the same
}


@pytest.fixture
def extent(device: torch.device, family_model: Any, request: pytest.FixtureRequest) -> tuple[slice, int]:
    """Which prompts, and how many tokens are decoded after them."""
    family = request.node.callspec.params["family_model"]
    if device.type == "cuda":
        return slice(None), len(family_model.outputs[0])
    if family not in INTERPRETED:
        pytest.skip("interpreted for some families only")
    return INTERPRETED[family], 1


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of large gates, as on GPUs: 1 / inf
def test_prompts_and_decode_give_the_logits_of_transformers(
    new_driver: NewDriver, family_model: Any, device: torch.device, extent: tuple[slice, int]
) -> None:
    which, num_decoded = extent
    driver = new_driver(open_model(str(family_model.folder)), "triton", device=device.type)
    prompts, outputs = family_model.prompts[which], family_model.outputs[which]
    logits = driver.extend(dict(enumerate(prompts)))
    for step in range(num_decoded):
        ends = [len(prompt) - 1 + step for prompt in prompts]
        expected = [theirs[end] for theirs, end in zip(family_model.logits[which], ends, strict=True)]
        assert_close(logits, expected)
        logits = driver.decode({i: tokens[step] for i, tokens in enumerate(outputs)})


def assert_close(ours: Tensor, theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours.cpu(), torch.stack(theirs), atol=1e-3, rtol=1e-4)


def test_prompts_whose_keys_are_made_of_latents_give_the_logits_of_transformers(
    new_driver: NewDriver,
    family_model: Any,
    device: torch.device,
    extent: tuple[slice, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two parts, so that the second has a context; in pieces of a page and blocks of five queries."""
    source = open_model(str(family_model.folder))
    latent = source.config.latent
    if latent is None or source.config.indexer is not None:
        pytest.skip("no latents, or a choice among them")
    monkeypatch.setattr(decompression, "MADE_NBYTES", 1)
    monkeypatch.setattr(decompression, "FOUND_NBYTES", 5 * 4 * source.config.num_heads * latent.value_dim)
    monkeypatch.setattr(decompression.Decompression, "pays", lambda *lens: True)
    made: list[int] = []
    attend = latent_prompts.LatentPrompts.attend

    def counted(self: latent_prompts.LatentPrompts, kv: Tensor, scale: float, queries: Tensor, *rest: Any) -> None:
        made.append(len(queries))
        attend(self, kv, scale, queries, *rest)

    monkeypatch.setattr(latent_prompts.LatentPrompts, "attend", counted)
    driver = new_driver(source, "triton", device=device.type)
    both = zip(family_model.prompts, family_model.logits, strict=True)
    chosen = [(prompt, theirs) for prompt, theirs in both if len(prompt) > 5][: None if device.type == "cuda" else 2]
    driver.extend({i: prompt[: len(prompt) // 2] for i, (prompt, _) in enumerate(chosen)})
    logits = driver.extend({i: prompt[len(prompt) // 2 :] for i, (prompt, _) in enumerate(chosen)})
    making = [layer for layer in source.config.attention_layers if layer != source.config.num_layers - 1]
    assert sum(made) == len(making) * sum(len(prompt) for prompt, _ in chosen)
    expected = [theirs[len(prompt) - 1] for prompt, theirs in chosen]
    assert_close(logits, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    new_driver: NewDriver, family_model: Any
) -> None:
    """Teacher-forced. Where float32's first choice is clear beyond what rounding does to transformers, it is ours, too.

    Experts that are chosen otherwise in a token make some models' errors half as large again, on either side. Latents
    are attended to as they are, so queries and values are rounded once more.
    """
    source = open_model(str(family_model.folder))
    ours = forced(new_driver(source, "triton", "bfloat16", device="cuda"), family_model)
    theirs = forced_by_transformers(family_model)
    exact = torch.cat(
        [ends(each, prompt) for each, prompt in zip(family_model.logits, family_model.prompts, strict=True)]
    )
    their_error, our_error = ((each - exact).pow(2).mean().sqrt() for each in (theirs, ours))
    first, second = exact.topk(2).values.T
    is_clear = first - second > 2 * (theirs - exact).abs().max()
    wrong = (ours.argmax(-1) != exact.argmax(-1)) & is_clear
    print(f"errors: ours {our_error:.4f}, transformers' {their_error:.4f}; {int(is_clear.sum())} clear choices")
    assert our_error < (1.75 if source.config.latent is None else 2.5) * their_error + 1e-3
    assert not wrong.any()


def forced(driver: Any, model: Any) -> Tensor:
    """Return the logits behind each prompt and each of its outputs, `[rows, vocab_size]`, float32."""
    steps = [driver.extend(dict(enumerate(model.prompts)))]
    for step in range(len(model.outputs[0]) - 1):
        steps.append(driver.decode({i: tokens[step] for i, tokens in enumerate(model.outputs)}))
    return torch.stack(steps, dim=1).flatten(0, 1).float().cpu()


def forced_by_transformers(model: Any) -> Tensor:
    """Return the same as transformers computes it in bfloat16, on the GPU."""
    config = transformers.AutoConfig.from_pretrained(model.folder)
    made = getattr(transformers, config.architectures[0]).from_pretrained(
        model.folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    made = made.cuda().eval()
    with torch.inference_mode():
        texts = [[*prompt, *outputs] for prompt, outputs in zip(model.prompts, model.outputs, strict=True)]
        try:
            logits = [made(torch.tensor([text], device="cuda")).logits[0].float().cpu() for text in texts]
        except RuntimeError as error:  # its grouped products want strides of 16 bytes
            pytest.skip(f"transformers: {error}")
    return torch.cat([ends(each, prompt) for each, prompt in zip(logits, model.prompts, strict=True)])


def ends(logits: Tensor, prompt: list[int]) -> Tensor:
    """Return those behind a prompt and each output but the last."""
    return logits[len(prompt) - 1 : -1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_logits_have_the_same_bits_in_any_batch_and_as_prompt_or_output(
    new_driver: NewDriver, family_model: Any, dtype: str
) -> None:
    try:
        driver = new_driver(open_model(str(family_model.folder)), "triton", dtype, device="cuda", deterministic=True)
    except ConfigError as error:
        pytest.skip(str(error))
    together = forced(driver, family_model).view(len(family_model.prompts), len(family_model.outputs[0]), -1)
    for i, (prompt, outputs) in enumerate(zip(family_model.prompts, family_model.outputs, strict=True)):
        driver.forget(i)
        alone = [driver.extend({i: prompt[at : at + 29]}) for at in range(0, len(prompt), 29)][-1]
        assert torch.equal(alone[0].float().cpu(), together[i][0])
        driver.forget(i)
        replayed = driver.extend({i: [*prompt, *outputs[:5]]})
        assert torch.equal(replayed[0].float().cpu(), together[i][5])
