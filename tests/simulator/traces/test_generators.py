"""Generated loads have the figures that were published, and are the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from diptych.common.arrays import F64, I64
from diptych.common.errors import ConfigError
from diptych.simulator.traces import azure, mooncake
from diptych.simulator.traces.call import BLOCK_TOKENS, Call, digest_of
from diptych.simulator.traces.generators.agentic import SHAPE, SUB_AGENT_TURNS
from diptych.simulator.traces.generators.arrivals import Bursts
from diptych.simulator.traces.generators.named import GENERATORS, generate

SHARED = Path(__file__).parents[4] / "shared" / "data" / "traces"
NUM = 6000
LENS = {  # published: percentiles 50, 90 and 99 of prompts and of outputs, and tokens found in an infinite cache
    "chat": ((6909, 27_370, 85_400), (350, 597, 1119), 0.374),
    "agentic": ((195_000, 521_000, 849_000), (317, 1705, 7551), 0.96),
    "bursty": ((1020, 2734, 4142), (129, 424, 601), 0.0),
}


def percentiles(values: Sequence[float] | F64 | I64) -> F64:
    return np.array(np.percentile(values, (50, 90, 99)))


def reused(calls: Sequence[Call]) -> F64:
    """Return the share of each prompt that an infinite cache has."""
    lens = np.array([len(call.blocks) for call in calls])
    starts = np.cumsum(lens) - lens
    first = np.zeros(int(lens.sum()), bool)
    first[np.unique(np.concatenate([call.blocks for call in calls]), return_index=True)[1]] = True
    places = np.where(first, np.arange(len(first)), len(first))  # of blocks that nobody had before
    known = np.minimum(np.minimum.reduceat(places, starts) - starts, lens)
    return np.array(np.minimum(1.0, known * BLOCK_TOKENS / np.array([call.prompt_len for call in calls])))


def hit_rate(calls: Sequence[Call]) -> float:
    lens = np.array([call.prompt_len for call in calls])
    return float((reused(calls) * lens).sum() / lens.sum())


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_gives_the_same_calls_at_the_rate_that_was_asked_for(name: str) -> None:
    num = 1500
    calls = generate(name, num, 4.0, seed=3)
    assert digest_of(calls) == digest_of(generate(name, num, 4.0, seed=3))
    assert digest_of(calls) != digest_of(generate(name, num, 4.0, seed=4))
    assert len(calls) == num
    arrivals = np.array([call.arrival_s for call in calls])
    assert (np.diff(arrivals) >= 0).all()
    assert num / np.ptp(arrivals) == pytest.approx(4.0, rel=0.4 if name == "bursty" else 0.1)
    assert all(len(call.blocks) == -(-call.prompt_len // BLOCK_TOKENS) for call in calls)
    assert min(min(call.prompt_len, call.output_len) for call in calls) >= 1


@pytest.mark.parametrize("name", LENS)
def test_lengths_and_reuse_are_those_that_were_published(name: str) -> None:
    prompts, outputs, hits = LENS[name]
    calls = generate(name, NUM, 5.0, seed=0)
    assert percentiles([call.prompt_len for call in calls]) == pytest.approx(prompts, rel=0.25)
    assert percentiles([call.output_len for call in calls]) == pytest.approx(outputs, rel=0.15)
    assert hit_rate(calls) == pytest.approx(hits, abs=0.04)


def test_code_sessions_grow_as_those_of_swe_bench_do() -> None:
    calls = generate("code", NUM, 5.0, seed=0)
    lens = np.array([call.prompt_len for call in calls])
    assert percentiles(lens)[:2] == pytest.approx((46_000, 80_000), rel=0.15)  # from 12K to 80K, evenly
    assert lens.sum() / sum(call.output_len for call in calls) == pytest.approx(131, rel=0.15)
    assert hit_rate(calls) == pytest.approx(0.942, abs=0.01)


def test_agents_reuse_nearly_all_of_nearly_every_prompt_and_half_of_their_turns_are_sub_agents() -> None:
    shares = reused(generate("agentic", NUM, 1.0, seed=0))[
        NUM // 2 :
    ]  # sessions that began before find nothing at first
    assert (shares >= 0.9).mean() == pytest.approx(0.96, abs=0.04)
    rng = np.random.default_rng(0)
    assert percentiles(SHAPE.growth.draw(rng, 100_000)) == pytest.approx((632, 3735, 148_000), rel=0.1)
    assert percentiles(SHAPE.gap_s.draw(rng, 100_000)) == pytest.approx((2.0, 24.0, 684.0), rel=0.1)
    assert percentiles(SHAPE.turns.draw(rng, 100_000)) == pytest.approx((107, 354, 992), rel=0.1)
    assert percentiles(SUB_AGENT_TURNS.draw(rng, 100_000))[:2] == pytest.approx((7, 51), rel=0.1)


def test_bursts_spread_counts_as_a_markov_modulated_poisson_process_does() -> None:
    bursts = Bursts()
    arrivals = np.array([call.arrival_s for call in generate("bursty", 60_000, 10.0, seed=1)])
    counts = np.histogram(arrivals, bins=np.arange(0, arrivals[-1], 50.0))[0]
    calm, burst = 10.0 * bursts.calm_rate, 10.0 * bursts.calm_rate * bursts.times_busier
    leave = 1 / bursts.burst_s + 1 / bursts.calm_s
    spread = 2 * (burst - calm) ** 2 * bursts.burst_s * bursts.calm_s / (bursts.burst_s + bursts.calm_s) ** 2
    window = 1 - (1 - np.exp(-leave * 50.0)) / (leave * 50.0)
    expected = 1 + spread / (leave * 10.0) * window  # Fischer and Meier-Hellstern, 1993: variance by mean
    assert counts.var() / counts.mean() == pytest.approx(expected, rel=0.25)


def test_fifteen_of_a_hundred_calls_are_long_and_patient() -> None:
    calls = generate("bimodal", NUM, 5.0, seed=0)
    batch = [call for call in calls if call.tier == "batch"]
    assert len(batch) / NUM == pytest.approx(0.15, abs=0.015)
    assert {call.prompt_len for call in batch} == {16_384}
    assert max(call.prompt_len for call in calls if call.tier == "tight") < 4096


def test_a_load_is_as_heavy_at_its_end_as_at_its_beginning() -> None:
    calls = generate("chat", NUM, 5.0, seed=0)
    first, second = (np.mean([call.prompt_len for call in part]) for part in (calls[: NUM // 2], calls[NUM // 2 :]))
    assert first == pytest.approx(second, rel=0.1)


def test_what_can_not_be_generated_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing generates 'chats'; there are chat, code"):
        generate("chats", 10, 1.0, 0)
    with pytest.raises(ConfigError, match="two calls or more"):
        generate("chat", 1, 1.0, 0)


@pytest.mark.skipif(not SHARED.exists(), reason="the published traces are not here")
def test_the_published_figures_are_those_of_the_published_traces() -> None:
    with (SHARED / "mooncake_conversation_trace.jsonl").open(encoding="utf-8") as lines:
        chat = mooncake.read(lines)
    with (SHARED / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv").open(encoding="utf-8") as lines:
        conversations = azure.read(lines)
    for name, calls in (("chat", chat), ("bursty", conversations)):
        prompts, outputs, hits = LENS[name]
        assert percentiles([call.prompt_len for call in calls]) == pytest.approx(prompts, rel=0.01)
        assert percentiles([call.output_len for call in calls]) == pytest.approx(outputs, rel=0.01)
        assert hit_rate(calls) == pytest.approx(hits, abs=0.01)
