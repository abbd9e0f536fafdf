"""Traces are read as they were written, whoever wrote them, and a wrong line is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from diptych.common.errors import ConfigError
from diptych.generation.page_hash import page_hashes
from diptych.router.values.logged_request import LoggedRequest, block_names, names_in
from diptych.simulator.traces import azure, mooncake, request_log
from diptych.simulator.traces.call import digest_of
from diptych.simulator.traces.generators.named import GENERATORS, generate
from diptych.simulator.traces.reading import at_rate, read_calls

ROWS = [
    {"timestamp": stamp, "input_length": 600, "output_length": 0, "hash_ids": [0, number]}
    for number, stamp in enumerate((0, 0, 3000, 3000), 1)
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,1200,9\n"
)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_trace_is_saved_in_a_file_and_read_again(name: str) -> None:
    calls = generate(name, 200, 3.0, seed=5)
    lines = list(mooncake.write(replace(call, tenant="a") for call in calls))
    assert digest_of(read_calls(lines)) == digest_of(replace(call, tenant="a") for call in calls)


def test_calls_on_a_grid_are_spread_up_to_the_next_point_and_exact_ones_are_not() -> None:
    assert [call.arrival_s for call in mooncake.calls_of(ROWS)] == [0.0, 1.5, 3.0, 3.0]
    exact = [{**row, "timestamp": float(row["timestamp"])} for row in ROWS]  # type: ignore[arg-type]
    assert [call.arrival_s for call in mooncake.calls_of(exact)] == [0.0, 0.0, 3.0, 3.0]
    first, second, *_ = mooncake.calls_of(ROWS)
    assert (first.blocks == second.blocks).tolist() == [True, False]
    assert first.output_len == 1


def test_azure_says_when_and_how_long_and_no_two_prompts_share_a_block() -> None:
    first, second = read_calls(AZURE.splitlines(keepends=True))
    assert (first.arrival_s, first.prompt_len, first.output_len) == (0.0, 374, 44)
    assert (second.arrival_s, second.prompt_len, second.output_len) == (4.314579, 1200, 9)
    assert len(np.unique(np.concatenate([first.blocks, second.blocks]))) == 1 + 3


def logged(arrival: float, ids: list[int], *, is_text: bool = False) -> str:
    blocks = "" if is_text else block_names(np.array(ids), b"salt")
    return LoggedRequest(arrival, len(ids), 7, 0, blocks, "5e55", "batch", 0.5, None, "stop").to_line()


def test_a_request_log_tells_which_prompts_begin_alike_and_nothing_of_what_they_say() -> None:
    ids = list(range(700))
    lines = [logged(1e9 + 2.5, [*ids, 7]), logged(1e9, ids), logged(1e9 + 3, ids, is_text=True)]
    first, second, third = read_calls(lines)
    assert [call.arrival_s for call in (first, second, third)] == [0.0, 2.5, 3.0]
    assert (first.blocks == second.blocks).tolist() == [True, False]
    assert not np.isin(third.blocks, first.blocks).any()
    assert {(call.tier, call.session, call.output_len) for call in (first, second, third)} == {("batch", "1", 7)}
    assert names_in(block_names(np.array(ids), b"salt"))[0] == page_hashes(np.array(ids), 512, b"salt")[0]
    assert digest_of(read_calls(list(mooncake.write((first, second, third))))) == digest_of((first, second, third))


def test_a_trace_is_replayed_faster_or_slower() -> None:
    calls = at_rate(generate("bimodal", 100, 3.0, seed=1), 6.0)
    assert 100 / (calls[-1].arrival_s - calls[0].arrival_s) == pytest.approx(6.0)
    with pytest.raises(ConfigError, match="all come at once"):
        at_rate(calls[:1], 6.0)


@pytest.mark.parametrize(
    ("read", "lines", "words"),
    [
        (mooncake.read, ["{}", '{"timestamp": "x"}'], "line 1: timestamp must be a number, 0 or more, not None"),
        (mooncake.read, ["[1]"], "line 1 must be a JSON object"),
        (mooncake.read, [json.dumps(ROWS[0]), "{"], "line 2 is no JSON"),
        (mooncake.read, [json.dumps({**ROWS[0], "hash_ids": [0]})], "line 1: a prompt of 600 tokens has 2 blocks"),
        (mooncake.read, [json.dumps({**ROWS[0], "hash_ids": ["a", "b"]})], "hash_ids must be a list of whole numbers"),
        (mooncake.read, [json.dumps({**ROWS[0], "input_length": -5})], "input_length must be a number, 0 or more"),
        (azure.read, ["TIMESTAMP,ContextTokens\n"], "lacks the column GeneratedTokens"),
        (azure.read, [AZURE.splitlines()[0], "yesterday,1,2"], "line 2: TIMESTAMP must be a date and a time"),
        (azure.read, [AZURE.splitlines()[0]], "no call in it"),
        (request_log.read, ['{"log": 1}'], "line 1 is none of a request log"),
        (request_log.read, [logged(1.0, [1] * 600).replace('"prompt_len":600', '"prompt_len":9')], "has 2 names"),
        (read_calls, ["hello\n"], "no known format"),
        (read_calls, [], "it is empty"),
    ],
)
def test_a_wrong_line_is_named_with_what_it_lacks(
    read: Callable[[list[str]], object], lines: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(lines)
