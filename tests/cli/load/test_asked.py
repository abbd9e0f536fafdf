from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.cli.load.asked import (
    LOWEST_TOKEN,
    Asked,
    arrivals,
    as_text,
    as_tokens,
    asked_of,
    conversations,
    random_calls,
    within,
)
from diptych.common.errors import ConfigError
from diptych.simulator.traces.call import Call, names_of


def call(prompt_len: int, *blocks: int, **others: Any) -> Call:
    return Call(0.0, prompt_len, 4, names_of(np.array(blocks)), **others)


def test_blocks_of_one_name_are_the_same_words_and_the_same_tokens() -> None:
    first, second, other = call(600, 1, 2), call(1024, 1, 3), call(600, 4, 2)
    words = [as_text(each).split() for each in (first, second, other)]
    tokens = [as_tokens(each, 30_000) for each in (first, second, other)]
    for one, two, three in (words, tokens):
        assert (len(one), len(two), one[:512] == two[:512], one[512:] == two[512:600]) == (600, 1024, True, False)
        assert one[:512] != three[:512]
        assert one[512:] == three[512:]
    assert min(map(min, tokens)) >= LOWEST_TOKEN
    assert max(map(max, tokens)) < 30_000
    assert set(as_tokens(first, 2)) == {1}


def test_random_calls_share_nothing_and_have_the_lengths_that_are_said() -> None:
    calls = random_calls(50, 600, 20, 0.5, rate=0.0, seed=1)
    blocks = np.concatenate([each.blocks for each in calls])
    assert len(set(blocks.tolist())) == len(blocks)
    assert set(blocks.tolist()).isdisjoint(
        np.concatenate([each.blocks for each in random_calls(50, 600, 20, 0.5, 0, 2)])
    )
    lengths = [(each.prompt_len, each.output_len) for each in calls]
    assert all(300 <= prompt <= 900 and 10 <= output <= 30 for prompt, output in lengths)
    assert len(set(lengths)) > 40
    assert {(each.prompt_len, each.output_len) for each in random_calls(9, 600, 20, 0.0, 0, 1)} == {(600, 20)}


def test_calls_come_by_chance_at_a_rate_or_all_at_once() -> None:
    assert arrivals(3, 0.0, 1) == [0.0] * 3
    times = arrivals(4000, 8.0, 1)
    assert (times[0], 400 < times[-1] < 600, times == sorted(times)) == (0.0, True, True)


def test_a_call_of_a_closed_loop_waits_for_the_one_before_it() -> None:
    calls = [call(5, 1, session="a"), call(6, 2, session="b"), replace(call(7, 3, session="a"), gap_s=1.5)]
    assert [(each.follows, each.gap_s) for each in asked_of(calls)] == [(-1, 0.0), (-1, 0.0), (0, 1.5)]
    assert all(math.isnan(each.gap_s) for each in calls[:2])


def test_what_has_no_room_is_left_out_and_nobody_waits_for_it() -> None:
    load = [Asked(0, "a", 90, 20), Asked(0, "b", 9, 2), Asked(1, "c", 9, 2, 0, 1.0), Asked(1, "d", 9, 2, 1, 1.0)]
    assert [(each.prompt, each.follows) for each in within(load, 100)] == [("b", -1), ("c", -1), ("d", 0)]


def talk(*texts: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_conversations_are_asked_by_their_first_turn_as_long_as_its_answer() -> None:
    texts = [talk("q" * 40, "a" * 80, "q2"), talk("short", "a" * 80), talk("only one turn" * 9), talk(None, 3), "odd"]
    (asked,) = conversations(json.dumps(texts), 0, 0.0, 1)
    assert (asked.prompt, asked.prompt_len, asked.output_len) == ("q" * 40, 10, 20)
    many = json.dumps([talk(f"{number} " * 20, "a" * 80) for number in range(9)])
    chosen = [each.prompt for each in conversations(many, 5, 0.0, 1)]
    assert len(set(chosen)) == 5
    assert chosen == [each.prompt for each in conversations(many, 5, 0.0, 1)]


@pytest.mark.parametrize(("text", "words"), [("[", "no JSON"), ("{}", "a list"), ("[]", "no conversation")])
def test_a_file_without_conversations_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        conversations(text, 0, 0.0, 1)
