"""The right answers, alone and over pages of every type, and the wrong ones that damaged pages give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stepped_engine import PAGE

from diptych.common.errors import ConfigError
from diptych.engine.sim.answers import SimVocabulary, expected_tokens
from diptych.engine.sim.hardware import IMPOSSIBLE, SimRunner
from diptych.engine.sim.marked_pages import MarkedPages
from diptych.engine.values.batch import ForwardBatch, ForwardMode, PromptRows, SamplingBatch
from diptych.engine.values.step_model import StepModel
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.kvtransfer.layout import PoolLayout

SPEECH = SimVocabulary(np.arange(100, 201))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Pool:
    """The memory of a pool of 64 pages, and the model on it."""

    def __init__(self, dtype: str = "bfloat16", timing: StepModel | None = None, **clocks: Any) -> None:
        self.layout = PoolLayout.kv(64, 2, PAGE, 1, 8, dtype)
        memory = memoryview(bytearray(self.layout.nbytes))
        self.bytes = np.frombuffer(memory, np.uint8).reshape(64, -1)
        self.runner = SimRunner(MarkedPages(memory, self.layout), SPEECH, timing or StepModel(), **clocks)


def extend(tokens: list[int], pages: list[int], start: int = 0, prompt_rows: PromptRows | None = None) -> ForwardBatch:
    positions = np.arange(start, len(tokens))
    table = np.array([pages], np.int32)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=np.array(tokens[start:], np.int64),
        positions=positions,
        out_slots=table[0][positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
        page_table=table,
        seq_lens=np.array([len(tokens)]),
        extend_lens=np.array([len(tokens) - start]),
        num_sampled=np.ones(1, np.int64),
        prompt_rows=prompt_rows,
    )


def greedy(**parts: Any) -> SamplingBatch:
    one = np.ones(1, np.int64)
    return SamplingBatch(
        np.zeros(1, np.float32), np.ones(1, np.float32), one, np.zeros(1, np.uint64), one * len(PROMPT), **parts
    )


def next_token(pool: Pool, tokens: list[int], pages: list[int], start: int = 0, **sampling: Any) -> int:
    return int(pool.runner.execute(extend(tokens, pages, start), greedy(**sampling)).token_ids[0])


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
def test_a_scheduler_over_pages_of_any_type_gives_the_expected_answer(
    new_engine: Callable[..., Any], dtype: str
) -> None:
    engine = new_engine(runner=Pool(dtype).runner, max_step_tokens=4)
    for room in (1, 2):  # the second one finds its prompt cached
        engine.start(room, PROMPT * 3, 20)
        engine.run()
        assert engine.tokens(room) == expected_tokens(PROMPT * 3, 20, SPEECH)


def test_an_answer_goes_on_as_if_it_had_been_part_of_the_prompt() -> None:
    answer = expected_tokens(PROMPT, 12, SPEECH)
    assert expected_tokens(PROMPT + answer[:5], 7, SPEECH) == answer[5:]


def test_an_answer_that_ends_by_itself_ends_with_the_token_for_it() -> None:
    answers = [expected_tokens([first, *PROMPT], 600, SPEECH) for first in range(20)]
    ended = [answer for answer in answers if len(answer) < 600]
    assert ended
    assert all(answer.index(SPEECH.eos_id) == len(answer) - 1 for answer in ended)


def test_rows_of_several_tokens_are_answered_token_by_token() -> None:
    pool, pages, answer = Pool(), list(range(3, 9)), expected_tokens(PROMPT, 3, SPEECH)
    assert next_token(pool, PROMPT, pages) == answer[0]
    row = replace(extend([*PROMPT, *answer], pages, len(PROMPT)), mode=ForwardMode.DECODE, num_sampled=np.array([3]))
    sampling = SamplingBatch(
        np.zeros(3, np.float32), np.ones(3, np.float32), np.zeros(3, np.int64), np.zeros(3, np.uint64), row.positions
    )
    expected = [*answer[1:], expected_tokens([*PROMPT, *answer], 1, SPEECH)[0]]
    assert pool.runner.execute(row, sampling).token_ids.tolist() == expected


def damaged(pool: Pool, how: str) -> None:
    own, page = pool.bytes, pool.layout.page_nbytes
    match how:
        case "a page never arrived":
            own[5] = 0
        case "a page is another request's":
            own[5] = own[40]
        case "two pages are in each other's place":
            own[[5, 6]] = own[[6, 5]]
        case "the last layer of a page never arrived":
            own[5, page // 2 :] = 0
        case "one value is off by one bit":
            own[6, 0] ^= 0x80


@pytest.mark.parametrize(
    "how",
    [
        "a page never arrived",
        "a page is another request's",
        "two pages are in each other's place",
        "the last layer of a page never arrived",
        "one value is off by one bit",
    ],
)
@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
def test_lost_or_mixed_up_kv_gives_another_answer(dtype: str, how: str) -> None:
    pool = Pool(dtype)
    next_token(pool, [8] * 12, [40, 41, 42])
    tokens = PROMPT + expected_tokens(PROMPT, 1, SPEECH)
    assert next_token(pool, PROMPT, [5, 6, 7]) == tokens[-1]
    damaged(pool, how)
    seen = []
    for _ in range(3):  # by chance one token is the right one all the same, but not several
        seen.append(next_token(pool, tokens, [5, 6, 7, 8], len(tokens) - 1))
        tokens.append(seen[-1])
    assert seen != expected_tokens(tokens[: -len(seen)], len(seen), SPEECH)


def test_the_model_is_sure_of_what_it_would_say_itself() -> None:
    first, second = expected_tokens(PROMPT, 2, SPEECH)
    rows = PromptRows(np.array([len(PROMPT) - 1]), np.array([first]), num_top=2)
    batch = extend([*PROMPT, first], [5, 6, 7], prompt_rows=rows)
    result = Pool().runner.execute(batch, greedy(num_top=np.array([3])))
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert (result.token_ids[0], result.logprobs.logprobs[0], result.logprobs.top_ids[0, 0]) == (second, 0.0, second)
    assert result.logprobs.top_logprobs.tolist() == [[0.0, IMPOSSIBLE, IMPOSSIBLE]]
    assert (result.prompt_logprobs.logprobs[0], result.prompt_logprobs.top_ids[0, 0]) == (0.0, first)


def test_a_mask_is_kept() -> None:
    for allowed in (1, 150, 255):
        mask = np.zeros((1, 8), np.int32)
        mask.view(np.uint8)[0, allowed // 8] = 1 << allowed % 8
        assert next_token(Pool(), PROMPT, [5, 6, 7], token_mask=mask) == allowed


def test_a_step_takes_its_time_layer_by_layer() -> None:
    now, layers = [100.0], list[tuple[int, float]]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    listener = lambda: lambda layer: layers.append((layer, now[0] - 100))  # noqa: E731
    pool = Pool(
        timing=StepModel(step=1.0, prompt_step=1.0, prompt_token=0.1),
        layer_listener=listener,
        clock=lambda: now[0],
        sleep=sleep,
    )
    pool.runner.execute(extend(PROMPT, [5, 6, 7]), greedy())
    assert layers == [(0, 0.0), (1, 1.0)]
    assert now == [102.0]


def test_a_pool_too_narrow_for_marks_is_refused() -> None:
    layout = PoolLayout.kv(2, 1, 16, 1, 2, "bfloat16")
    with pytest.raises(ConfigError, match="--device sim"):
        MarkedPages(memoryview(bytearray(layout.nbytes)), layout)
