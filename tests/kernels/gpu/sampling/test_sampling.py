"""Few rows in the interpreter, which takes a tenth of a second for a row that is cut; whole batches on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych.kernels.gpu.sampling.sampling import (
    SamplingWorkspace,
    greedy,
    reference_sample,
    sample,
    sampling_workspace,
)

Params = dict[str, Tensor]


def params(num_rows: int, device: torch.device, **chosen: float) -> Params:
    values = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0} | chosen
    made = {name: torch.full((num_rows,), value, dtype=torch.float64) for name, value in values.items()}
    made.setdefault("uniforms", torch.rand(num_rows, dtype=torch.float64))
    return {name: value.to(device) for name, value in made.items()}


def mixed_params(num_rows: int, device: torch.device) -> Params:
    choices = {
        "temperature": (0.0, 0.3, 1.0, 5.0),
        "top_k": (0.0, 1.0, 50.0, 2.0**40),
        "top_p": (0.2, 0.9, 0.999, 1.0),
        "min_p": (0.0, 0.0, 0.01, 0.5),
    }
    made = {
        name: torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (num_rows,))]
        for name, values in choices.items()
    }
    return {name: value.to(device) for name, value in (made | {"uniforms": torch.rand(num_rows).double()}).items()}


def tokens_of(logits: Tensor, chosen: Params) -> Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    sample_into(tokens, logits, chosen, sampling_workspace(len(logits), logits.shape[1], logits.device))
    return tokens


def sample_into(tokens: Tensor, logits: Tensor, chosen: Params, workspace: SamplingWorkspace) -> None:
    names = ("temperature", "top_k", "top_p", "min_p", "uniforms")
    heat, top_k, top_p, min_p, uniforms = (chosen[name] for name in names)
    sample(logits, heat, top_k, top_p, min_p, uniforms, tokens, workspace)


def sizes(device: torch.device, few: tuple[int, int], many: tuple[int, int]) -> tuple[int, int]:
    return few if device.type == "cpu" else many


@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_tokens_are_those_of_sorting_in_float64(device: torch.device, scale: float) -> None:
    shape = sizes(device, (6, 700), (256, 128_256))
    logits, chosen = scale * torch.randn(shape, device=device), mixed_params(shape[0], device)
    matches = tokens_of(logits, chosen) == reference_sample(logits, **chosen)
    assert matches.double().mean() >= (1 if device.type == "cpu" else 0.99)  # but for the order of adding up


@pytest.mark.parametrize(
    "cut", [{"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}, {"top_k": 300, "min_p": 0.01}, {"min_p": 0.02}]
)
def test_rows_like_a_language_models_are_drawn_from_the_same_candidates(
    device: torch.device, cut: dict[str, float]
) -> None:
    """Few tokens are likely, they are anywhere, and in bfloat16 many are alike."""
    shape = sizes(device, (5, 9000), (256, 128_256))
    ranks = torch.rand(shape, device=device).argsort(dim=-1)
    power = torch.linspace(1.1, 3, shape[0], device=device)[:, None]
    logits, chosen = (20 - power * (ranks + 1).log()).bfloat16(), params(shape[0], device, **cut)
    matches = tokens_of(logits, chosen) == reference_sample(logits, **chosen)
    assert matches.double().mean() >= (1 if device.type == "cpu" else 0.99)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 2500}])
def test_what_flat_rows_keep_is_found_among_more_weights_than_are_collected(
    device: torch.device, cut: dict[str, float]
) -> None:
    """Tokens are in the order of their logits: the first that can be drawn is the least likely one that is kept."""
    shape = sizes(device, (1, 5000), (64, 262_144))
    logits = (0.1 * torch.randn(shape, device=device)).sort(dim=-1).values
    chosen = params(shape[0], device, **cut)
    chosen["uniforms"][:] = 0.0
    difference = tokens_of(logits, chosen) - reference_sample(logits, **chosen)
    assert difference.abs().max() <= 1e-5 * shape[1]  # but for the order of adding up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest(device: torch.device, dtype: torch.dtype) -> None:
    shape = sizes(device, (9, 1001), (256, 151_936))
    logits = torch.randn(shape, device=device).to(dtype)
    logits[1] = 0.5
    logits[2, 999] = logits[2, 600] = logits[2, 601] = 8
    logits[3, shape[1] - 1] = 9
    logits[4:7] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None]
    logits[7, 700] = torch.nan
    expected = logits.float().argmax(dim=-1)
    expected[1], expected[2], expected[4:8] = 0, 600, -1
    workspace = sampling_workspace(shape[0], shape[1], device)
    tokens = torch.empty_like(expected)
    greedy(logits, tokens, workspace)
    assert torch.equal(tokens, expected)
    assert torch.equal(tokens_of(logits, params(shape[0], device, temperature=0.0, top_p=0.5)), expected)


def test_a_row_without_usable_logits_has_no_token_and_harms_no_other(device: torch.device) -> None:
    logits, chosen = torch.randn(5, 300, device=device), params(5, device)
    expected = tokens_of(logits, chosen)
    logits[1, 299] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    expected[1:4] = -1
    assert torch.equal(tokens_of(logits, chosen), expected)


def test_what_has_no_weight_is_never_drawn_and_both_ends_of_what_has_are(device: torch.device) -> None:
    logits = torch.full((4, 1000), -torch.inf, device=device)
    logits[:, 200:205] = torch.tensor([1.0, 0.0, 3.0, -2.0, 0.5], device=device)
    logits[:, 300] = -500.0  # exp underflows
    chosen = params(4, device)
    chosen["uniforms"] = torch.tensor([0.0, 1e-300, 1 - 2.0**-53, 0.0], dtype=torch.float64, device=device)
    chosen["min_p"][3] = 1.0
    assert tokens_of(logits, chosen).tolist() == [200, 200, 204, 202]


def test_a_number_between_two_tokens_means_the_later_one(device: torch.device) -> None:
    chosen = params(4, device)
    chosen["uniforms"] = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64, device=device)
    assert tokens_of(torch.zeros(4, 4, device=device), chosen).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.3}])
def test_tokens_that_are_alike_are_kept_together(device: torch.device, cut: dict[str, float]) -> None:
    logits = torch.zeros(3, 640, device=device)
    logits[:, 600] = -1
    chosen = params(3, device, **cut)
    chosen["uniforms"] = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64, device=device)
    assert tokens_of(logits, chosen).tolist() == [0, 319, 639]


def test_a_rows_token_depends_on_no_other_row(device: torch.device) -> None:
    logits, chosen = torch.randn(2, 900, device=device), params(2, device, top_p=0.8)
    together = tokens_of(logits, chosen)
    alone = tokens_of(logits[1:], {name: value[1:] for name, value in chosen.items()})
    assert torch.equal(alone, together[1:])


def test_rows_of_a_wider_tensor_are_read_where_they_are(device: torch.device) -> None:
    logits, chosen = torch.randn(3, 800, device=device), params(3, device)
    assert torch.equal(tokens_of(logits[:, 100:500], chosen), tokens_of(logits[:, 100:500].contiguous(), chosen))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_draws_by_the_parameters_of_its_replay() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    logits, chosen = 3 * torch.randn(32, 128_256, device=device), mixed_params(32, device)
    workspace, tokens = sampling_workspace(32, 128_256, device), torch.empty(32, dtype=torch.int64, device=device)
    sample_into(tokens, logits, chosen, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_into(tokens, logits, chosen, workspace)
    for name, value in mixed_params(32, device).items():
        chosen[name].copy_(value)
    logits.normal_()
    graph.replay()
    assert torch.equal(tokens, tokens_of(logits, chosen))
