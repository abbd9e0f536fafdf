"""Every model family by kernels of GPUs against transformers; in the interpreter, the start of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.checkpoints.source import open_model

LARGE4 = "mistral large 4 with images, layers that share a choice, or latents, or both; groups"
NewDriver = Callable[..., Any]
INTERPRETED = {  # and which prompts
    "gemma3": slice(0, 2),  # norms before, after and of heads, windows, two embeddings of positions
    "gpt oss": slice(0, 2),  # sinks, experts with biases
    "deepseek v3": slice(0, 2),  # latents
    "gemma4, borrowed keys, wide networks, inputs of each layer": slice(0, 2),  # two kinds of layers, queries alone
    "glm moe dsa, layers that share a choice": slice(2, 4),  # an indexer, and prompts of more tokens than it keeps
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
