"""A worker that leaves has what it cached taken by its peer, where it is found: real processes, UCX and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diptych.engine.sim.known_answers import KnownAnswers

Platform = Any  # the fixture's class: test helpers can't be imported

PAGE = 16
PROMPT = [*range(50, 250)]
NUM_TOKENS = 24


@pytest.fixture
def platform(platform_class: type[Platform], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    options = ("--unified", "2", "--model", "sim", "--device", "sim", "--max-model-len", "1000")
    sizes = {"DIPTYCH_KV_CACHE_MIB": "4", "DIPTYCH_SIM_TIMING": "step=100,prompt=50,request=0,context=0"}
    started = platform_class(
        tmp_path_factory.mktemp("giving") / "log", prefill=0, decode=0, options=options, DIPTYCH_KV_PULL="on", **sizes
    )
    yield started
    started.stop()


def ask(platform: Platform, prompt: list[int]) -> tuple[list[int], int]:
    """Return the output, and how many tokens of the prompt were found cached."""
    answer = platform.complete(prompt, NUM_TOKENS, ignore_eos=True, return_token_ids=True)
    output: list[int] = answer["choices"][0]["token_ids"]
    assert output == expected(prompt)
    return output, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def expected(prompt: list[int]) -> list[int]:
    """Return the only right answer, which goes on behind what would end it."""
    known, output = KnownAnswers(), list[int]()
    while len(output) < NUM_TOKENS:
        output += known.tokens([*prompt, *output], NUM_TOKENS - len(output))
    return output


def num_links(platform: Platform) -> list[int]:
    return [len(each.instance.load.linked_instances) for each in platform.statuses()]


def test_a_text_whose_worker_leaves_is_found_at_the_other_one(platform: Platform, wait_for: Callable[..., Any]) -> None:
    wait_for(lambda: num_links(platform) == [1, 1], 200.0, "a link")
    output, cached = ask(platform, PROMPT)
    assert cached == 0
    platform.assert_clean()  # what the request had is cached
    (holder,) = [each for each in platform.statuses() if each.pages_by_state["cached"]]
    num_pages = holder.pages_by_state["cached"]
    platform.drain(holder.instance, 200.0)
    wait_for(lambda: platform.is_empty(holder.instance), 200.0, "nothing is left there")
    (taker,) = [each for each in platform.statuses() if each.instance.instance_id != holder.instance.instance_id]
    assert (taker.pages_taken, taker.pages_by_state["cached"]) == (num_pages, num_pages)
    assert taker.pulls_wrong == taker.integrity_failures == 0
    turn = [*PROMPT, *output, 7, 8, 9]
    assert ask(platform, turn)[1] == (len(PROMPT) + NUM_TOKENS - 1) // PAGE * PAGE
