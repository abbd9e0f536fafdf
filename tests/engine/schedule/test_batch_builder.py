from __future__ import annotations

from dataclasses import replace

import numpy as np

from diptych.engine.schedule.batch_builder import build_batch, placeholder
from diptych.engine.schedule.sampling_builder import SamplingBuilder
from diptych.engine.values.batch import ForwardMode
from diptych.engine.values.request import Request, new_request
from diptych.engine.values.step import new_step, next_chunk
from diptych.engine.values.token_counts import TokenCounts
from diptych.generation.sampling_params import SamplingParams

PAGE = 4
TABLE = np.array([[7, 3, 0], [5, 9, 2]], dtype=np.int32)
WINDOWS = np.array([[[11, 21], [12, 22], [0, 0]], [[14, 24], [15, 25], [16, 26]]], dtype=np.int32)  # of two groups


def request(row: int, tokens: list[int], computed_len: int, num_pages: int, seed: int = 0) -> Request:
    made = new_request(row + 1, np.array(tokens), SamplingParams(max_tokens=4, temperature=0.5, seed=seed, top_k=3))
    made.row, made.computed_len, made.num_pages = row, computed_len, num_pages
    return made


def test_an_extend_step_places_each_token_on_its_page_and_samples_complete_prompts() -> None:
    complete = request(0, [10, 11, 12, 13, 14], computed_len=3, num_pages=2, seed=42)
    partial = request(1, list(range(20, 30)), computed_len=0, num_pages=3)
    batch = build_batch(new_step((), [next_chunk(complete, 9), next_chunk(partial, 3)]), TABLE, PAGE)
    assert batch.mode is ForwardMode.EXTEND
    assert batch.input_ids.tolist() == [13, 14, 20, 21, 22]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2]
    assert batch.out_slots.tolist() == [7 * PAGE + 3, 3 * PAGE, 5 * PAGE, 5 * PAGE + 1, 5 * PAGE + 2]
    assert batch.seq_lens.tolist() == [5, 3]
    assert batch.extend_lens.tolist() == [2, 3]
    assert batch.page_table.tolist() == TABLE.tolist()
    assert batch.num_sampled.tolist() == [1, 0]
    assert batch.sampled_tokens.tolist() == [1]


def test_a_decode_step_computes_the_last_token_of_each_request() -> None:
    first = request(0, [1, 2, 3, 4], computed_len=4, num_pages=2)
    second = request(1, [5, 6], computed_len=2, num_pages=1)
    first.append(40)
    second.append(60)
    batch = build_batch(new_step([first, second], ()), TABLE, PAGE)
    assert batch.mode is ForwardMode.DECODE
    assert batch.input_ids.tolist() == [40, 60]
    assert batch.positions.tolist() == [4, 2]
    assert batch.out_slots.tolist() == [3 * PAGE, 5 * PAGE + 2]
    assert batch.page_table.tolist() == [[7, 3], [5, 9]]
    assert batch.seq_lens.tolist() == [5, 3]
    assert batch.num_sampled.tolist() == [1, 1]
    assert batch.sampled_tokens.tolist() == [0, 1]


def test_a_mixed_step_computes_running_requests_first_and_samples_them_too() -> None:
    running = request(0, [1, 2, 3, 4, 5], computed_len=4, num_pages=2)
    prompt = request(1, list(range(20, 26)), computed_len=0, num_pages=2)
    batch = build_batch(new_step([running], [next_chunk(prompt, 9)]), TABLE, PAGE)
    assert batch.mode is ForwardMode.MIXED
    assert batch.input_ids.tolist() == [5, 20, 21, 22, 23, 24, 25]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4, 5]
    assert batch.out_slots.tolist() == [3 * PAGE, *range(5 * PAGE, 6 * PAGE), 9 * PAGE, 9 * PAGE + 1]
    assert batch.extend_lens.tolist() == [1, 6]
    assert batch.seq_lens.tolist() == [5, 6]
    assert batch.num_sampled.tolist() == [1, 1]
    assert batch.sampled_tokens.tolist() == [0, 6]


def test_drafts_stand_behind_the_newest_token_of_their_row_and_are_sampled_from_too() -> None:
    drafted = request(0, [1, 2, 3, 4, 5], computed_len=4, num_pages=2)
    single = request(1, [5, 6, 7], computed_len=2, num_pages=1)
    drafts = {drafted.room: (8, 9)}
    batch = build_batch(new_step([drafted, single], (), drafts), TABLE, PAGE)
    assert batch.mode is ForwardMode.DECODE
    assert batch.input_ids.tolist() == [5, 8, 9, 7]
    assert batch.positions.tolist() == [4, 5, 6, 2]
    assert batch.out_slots.tolist() == [3 * PAGE, 3 * PAGE + 1, 3 * PAGE + 2, 5 * PAGE + 2]
    assert batch.seq_lens.tolist() == [7, 3]
    assert batch.extend_lens.tolist() == batch.num_sampled.tolist() == [3, 1]
    assert batch.sampled_tokens.tolist() == [0, 1, 2, 3]
    prompt = request(1, list(range(20, 26)), computed_len=0, num_pages=2)
    batch = build_batch(new_step([drafted], [next_chunk(prompt, 4)], drafts), TABLE, PAGE)
    assert batch.mode is ForwardMode.MIXED
    assert batch.input_ids.tolist() == [5, 8, 9, 20, 21, 22, 23]
    assert batch.num_sampled.tolist() == [3, 0]
    assert batch.is_row.tolist() == [True, False]
    assert batch.rows_of(batch.sampled_tokens).tolist() == [0, 0, 0]


def test_a_launched_step_counts_its_drafts_and_says_where_each_requests_samples_begin() -> None:
    drafted = request(0, [1, 2, 3, 4, 5], computed_len=4, num_pages=2)
    single = request(1, [5, 6, 7], computed_len=2, num_pages=1)
    step = new_step([drafted, single], (), {drafted.room: (8, 9)})
    assert list(step.first_samples) == [0, 3]
    step.launch()
    assert (drafted.computed_len, single.computed_len) == (7, 3)
    step.undo()
    assert (drafted.computed_len, single.computed_len) == (4, 2)


def test_samples_behind_drafts_are_drawn_at_their_positions_and_others_keep_what_they_asked_for() -> None:
    drafted, other = request(0, [1, 2, 3], 2, 1, seed=5), request(1, [5, 6], 1, 1, seed=6)
    other.params = replace(other.params, logit_bias={7: 1.5}, min_p=0.25, logprobs=2, frequency_penalty=1.0)
    other.samples_plainly = False
    other.counts = TokenCounts(prompt_len=2, max_tokens=6, counts_prompt=True)
    other.allowed = np.array([5], np.int32)
    other.params = replace(other.params, allowed_token_ids=(0, 2))
    sampling = SamplingBuilder(frozenset(), 32).build([drafted, other], {drafted.room: (8, 9)})
    assert sampling.seeds.tolist() == [5, 5, 5, 6]
    assert sampling.positions.tolist() == [3, 4, 5, 2]
    assert sampling.temperature.tolist() == [0.5] * 4
    assert sampling.min_p is not None
    assert sampling.min_p.tolist() == [0, 0, 0, 0.25]
    assert sampling.num_top is not None
    assert sampling.num_top.tolist() == [-1, -1, -1, 2]
    assert sampling.token_mask is not None
    assert sampling.token_mask.tolist() == [[-1], [-1], [-1], [5]]
    assert sampling.bias is not None
    assert sampling.bias.rows.tolist() == [3]
    assert sampling.penalties is not None
    assert set(sampling.penalties.rows.tolist()) == {3}


def test_what_requests_ask_for_is_kept_until_others_are_sampled_and_their_positions_are_not() -> None:
    one, other = request(0, [1, 2, 3], 2, 1, seed=5), request(1, [5, 6], 1, 1, seed=6)
    builder = SamplingBuilder(frozenset(), 32)
    first = builder.build([one, other])
    one.append(9)
    second, third = builder.build([one, other]), builder.build([other])
    assert (first.positions.tolist(), second.positions.tolist(), third.positions.tolist()) == ([3, 2], [4, 2], [2])
    assert (second.seeds.tolist(), third.seeds.tolist()) == ([5, 6], [6])
    assert second.temperature is first.temperature


def test_a_token_that_is_not_known_yet_has_a_placeholder() -> None:
    known = request(0, [1, 2, 3, 4], computed_len=3, num_pages=2)
    unknown = request(1, [5, 6, 7], computed_len=3, num_pages=1)
    batch = build_batch(new_step([known, unknown], ()), TABLE, PAGE, {known.room: 0, unknown.room: 4})
    assert batch.input_ids.tolist() == [4, placeholder(4)]
    assert batch.positions.tolist() == [3, 3]


def test_a_step_names_the_adapters_of_its_requests_if_one_has_any() -> None:
    plain, adapted = request(0, [1, 2, 3], computed_len=2, num_pages=1), request(1, [5, 6], computed_len=1, num_pages=1)
    adapted.adapter_slot = 3
    for requests, adapters in (([plain, plain], None), ([plain, adapted], [-1, 3])):
        chunks = [next_chunk(request, 1) for request in requests]
        for step in (new_step(requests, ()), new_step((), chunks), new_step(requests[:1], chunks[1:])):
            batch = build_batch(step, TABLE, PAGE)
            assert (None if batch.adapters is None else batch.adapters.tolist()) == adapters


def test_what_is_cached_is_not_stored_again() -> None:
    """A prompt that is cached whole has its last token computed, for what follows it, in pages that others read."""
    cached = request(0, list(range(10, 18)), computed_len=7, num_pages=2)
    cached.cached_len = 8
    other = request(1, [20, 21], computed_len=0, num_pages=1)
    batch = build_batch(new_step((), [next_chunk(cached, 9), next_chunk(other, 9)]), TABLE, PAGE)
    assert batch.positions.tolist() == [7, 0, 1]
    assert batch.out_slots.tolist() == [0, 5 * PAGE, 5 * PAGE + 1]
    assert batch.seq_lens.tolist() == [8, 2]


def test_layers_with_windows_have_pages_of_their_own_for_the_same_tokens() -> None:
    first, second = request(0, [1, 2, 3, 4, 5], computed_len=4, num_pages=2), request(1, [5, 6], 1, num_pages=1)
    decode = build_batch(new_step([second, first], ()), TABLE, PAGE, window_table=WINDOWS)
    assert decode.page_table.tolist() == [[5, 9], [7, 3]]
    assert decode.window_groups is not None
    assert decode.window_groups.page_tables.tolist() == [[[14, 15], [11, 12]], [[24, 25], [21, 22]]]
    assert decode.window_groups.out_slots.tolist() == [[14 * PAGE + 1, 12 * PAGE], [24 * PAGE + 1, 22 * PAGE]]
    prompt = request(1, list(range(20, 29)), computed_len=3, num_pages=3)
    mixed = build_batch(new_step([first], [next_chunk(prompt, 2)]), TABLE, PAGE, window_table=WINDOWS)
    assert mixed.window_groups is not None
    assert all(each.flags.c_contiguous for each in (mixed.window_groups.page_tables, mixed.window_groups.out_slots))
    assert mixed.window_groups.page_tables.tolist() == WINDOWS.transpose(2, 0, 1).tolist()
    assert mixed.window_groups.out_slots.tolist() == [
        [12 * PAGE, 14 * PAGE + 3, 15 * PAGE],
        [22 * PAGE, 24 * PAGE + 3, 25 * PAGE],
    ]


def test_what_is_cached_is_not_stored_again_in_any_group() -> None:
    cached = request(0, list(range(10, 18)), computed_len=7, num_pages=2)
    cached.cached_len = 8
    batch = build_batch(new_step((), [next_chunk(cached, 9)]), TABLE, PAGE, window_table=WINDOWS)
    assert batch.window_groups is not None
    assert (batch.out_slots.tolist(), batch.window_groups.out_slots.tolist()) == ([0], [[0], [0]])
