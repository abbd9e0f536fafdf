"""How large steps are on devices of all kinds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from diptych.engine.schedule.pace.step_sizes import (
    CPU_SIZES,
    MOST_GRAPH_TOKENS,
    MOST_REQUESTS,
    MOST_STEP_TOKENS,
    STEP_S,
    Chosen,
    Found,
    GivenSizes,
    StepSizes,
    choose,
    derived,
    usual,
    words,
)

CONTEXT = 8192
H200 = Found(prompt_tokens_per_s=40_000, launch_s=0.008, step_tokens_in_memory=50_000, kv_tokens=850_000)  # an 8B model


@pytest.mark.parametrize(
    ("found", "sizes"),
    [
        (H200, StepSizes(8192, 512, 512)),
        (replace(H200, prompt_tokens_per_s=36_000, kv_tokens=400_000), StepSizes(8192, 384, 448)),  # 80 GB
        (Found(3_500, 0.008, 6_000, 32_000), StepSizes(512, 64, 64)),  # a GPU of 24 GB
        (Found(8_000, 0.02, 20_000, 200_000), StepSizes(1024, 192, 256)),  # a large model on 80 GB
        (Found(600_000, 0.003, 1e6, 5_000_000), StepSizes(8192, 512, 2048)),  # a small one
        (replace(H200, launch_s=0.0), StepSizes(8192, 512, 0)),  # without graphs
        (replace(H200, step_tokens_in_memory=5_000), StepSizes(4096, 512, 512)),
    ],
)
def test_sizes_follow_from_speed_and_memory(found: Found, sizes: StepSizes) -> None:
    assert derived(found, CONTEXT) == sizes


SPEEDS, LAUNCHES_S = (0.5, 100.0, 5_000.0, 1e6, math.inf), (0.0, 1e-4, 1.0)
MEMORIES, KV_TOKENS = (0.0, 300.0, 3e3, math.inf), (0, 100, 10**5, 10**8)


def test_whatever_is_measured_sizes_are_within_bounds_and_a_step_takes_no_longer_than_it_should() -> None:
    for found in itertools.starmap(Found, itertools.product(SPEEDS, LAUNCHES_S, MEMORIES, KV_TOKENS)):
        sizes = derived(found, CONTEXT)
        assert CPU_SIZES.max_step_tokens <= sizes.max_step_tokens <= MOST_STEP_TOKENS, found
        assert CPU_SIZES.max_requests <= sizes.max_requests <= MOST_REQUESTS, found
        assert sizes.max_graph_tokens <= MOST_GRAPH_TOKENS, found
        assert (sizes.max_graph_tokens == 0) == (found.launch_s == 0), found
        if sizes.max_step_tokens > CPU_SIZES.max_step_tokens:
            assert sizes.max_step_tokens <= min(found.step_tokens_in_memory, found.prompt_tokens_per_s * STEP_S), found
        if sizes.max_requests > CPU_SIZES.max_requests:
            assert sizes.max_requests * 1024 <= found.kv_tokens, found


def test_requests_of_a_short_context_are_small() -> None:
    found = replace(H200, kv_tokens=100_000)
    assert (derived(found, 131072).max_requests, derived(found, 256).max_requests) == (96, 384)


def test_what_is_given_is_taken_and_the_rest_derived() -> None:
    sizes = derived(H200, CONTEXT)
    assert GivenSizes().or_else(sizes) == sizes
    assert GivenSizes(max_requests=7).or_else(sizes) == replace(sizes, max_requests=7)
    assert GivenSizes(100, 7, 64).or_else(sizes) == StepSizes(100, 7, 64)
    assert [GivenSizes(1, 2, 3).are_complete, GivenSizes(1, 2).are_complete] == [True, False]


def test_no_graph_holds_more_than_a_step() -> None:
    assert GivenSizes(max_step_tokens=100).or_else(derived(H200, CONTEXT)).max_graph_tokens == 100


def test_a_worker_says_what_it_serves_and_why_and_how_to_change_it() -> None:
    assert words(choose(GivenSizes(), lambda: H200, CONTEXT, int)) == (
        "serving up to 512 requests at once, 8192 prompt tokens a step, up to 512 from graphs "
        "(measured: 40,000 prompt tokens/s, about 850,000 tokens of KV); "
        "--max-requests, --max-step-tokens and --max-graph-tokens override"
    )
    assert "graphs (" not in words(usual(GivenSizes()))


def test_nothing_is_measured_where_everything_is_given() -> None:
    def find() -> Found:
        raise AssertionError("a step was run in vain")

    chosen = choose(GivenSizes(4096, 100, 256), find, CONTEXT, int)
    assert chosen == Chosen(StepSizes(4096, 100, 256), "as given")


def test_ranks_agree_on_each_size() -> None:
    """The others' numbers: one is slower, one has less memory."""
    others = iter([4096, 512, 256])
    chosen = choose(GivenSizes(), lambda: H200, CONTEXT, lambda number: min(number, next(others)))
    assert chosen.sizes == StepSizes(4096, 512, 256)


def test_a_cpu_keeps_its_sizes() -> None:
    assert usual(GivenSizes()).sizes == CPU_SIZES == StepSizes(512, 64, 0)
    assert usual(GivenSizes(max_requests=7)).sizes == replace(CPU_SIZES, max_requests=7)
