"""A pair of workers that has served every kind of request, with something in it that guesses, or without.

For tests of what may guess: a draft model, or a layer that predicts further tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from every_kind import KINDS, Answer, params_of, prompt_of, replayed

from diptych.checkpoints.source import ModelSource
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.kv_regions import pages_per_state, window_pages
from diptych.generation.sampling_params import SamplingParams

Pair = Any  # the fixture's class of `tests/pd`
ROOMS = range(1, 2 * len(KINDS) + 1)
VOCAB, PAGE, NUM_PAGES = 321, 4, 256
NEVER = 1 << 30  # moves between two looks at the books
NOTHING: Mapping[int, tuple[int, ...]] = {}


def greedy(room: int) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


class GuessingPair:
    """Both workers compute `source`; `drafter` asks what `new_runner` makes of it. Requests go on behind `said`."""

    def __init__(
        self,
        make_pair: type[Pair],
        source: ModelSource,
        new_runner: Callable[[ModelSource, torch.Tensor], ModelRunner],
        drafter: Any = None,
        said: Mapping[int, tuple[int, ...]] = NOTHING,
        params_of: Callable[[int], SamplingParams] = params_of,
        **options: Any,
    ) -> None:
        self.source, self.drafter = source, drafter

        def model(num_pages: int) -> tuple[Any, ModelRunner]:
            layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
            kv = torch.full(layout.shape, torch.nan)
            return kv.numpy(), new_runner(source, kv)

        one = ModelRunner.pool_layout(source.config, num_pages=1, page_size=PAGE, dtype="float32")
        self.pair = make_pair(
            pages_per_state=pages_per_state(source.config, 1, "float32", one),
            windows=window_pages(source.config, 1),
            prefill_pages=NUM_PAGES,
            decode_pages=NUM_PAGES,
            model=model,
            vocab_size=VOCAB,
            check_every=NEVER,
            drafter=drafter,
            **options,
        )
        if drafter is not None:
            drafter.begin(self.pair.decode.runner.draft_model, self.pair.decode.cache)
        self._serve(said, params_of)
        self.answers = {room: self._answer(room) for room in said or ROOMS}

    def _serve(self, said: Mapping[int, tuple[int, ...]], params_of: Callable[[int], SamplingParams]) -> None:
        pair = self.pair
        for room in said or ROOMS:
            tokens = said.get(room, ())
            params = replayed(params_of(room), len(tokens))
            pair.start_with(params, room, [*prompt_of(room), *tokens], num_prior_output_tokens=len(tokens))
            if room % 2:  # the others come beside it
                pair.run()
        pair.run()
        pair.close()
        pair.assert_clean()

    def _answer(self, room: int) -> Answer:
        return Answer.of([*self.pair.prefill.outputs[room][:1], *self.pair.decode.outputs[room]])

    @property
    def came(self) -> tuple[int, int]:
        """How many guesses came true, and how many were compared."""
        return self.drafter.came, self.drafter.compared

    @property
    def page_nbytes(self) -> int:
        return int(self.pair.prefill.kv[0].nbytes)


def said_in_mid_stream(answers: Mapping[int, Answer]) -> dict[int, tuple[int, ...]]:
    """Return the first tokens of answers, of each another number, where some are left behind them."""
    said = {room: answer.token_ids[: 1 + room % 8] for room, answer in answers.items()}
    return {room: tokens for room, tokens in said.items() if len(tokens) < len(answers[room].token_ids)}


def go_on(rest: Mapping[int, Answer], said: Mapping[int, tuple[int, ...]], whole: Mapping[int, Answer]) -> bool:
    """Return whether requests that were replayed behind what was said came to what they came to at once."""
    return all((*tokens, *rest[room].token_ids) == whole[room].token_ids for room, tokens in said.items())
