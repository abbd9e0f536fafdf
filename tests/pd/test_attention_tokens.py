"""What each output token looked at, by one worker and by a pair: as transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from answers import NUM_PAGES, VOCAB, WAYS, Answer, alone, answer_in, model_on, tokens
from every_kind import Scripted

from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult, WaitForResult
from diptych.engine.values.watched_layers import WatchedLayers
from diptych.generation.attention_tokens import NOBODY, AttentionWish, TokenAttention, join
from diptych.generation.output import FailureCode, Output
from diptych.generation.sampling_params import SamplingParams

NUM_MADE: Final = 6
WATCHED: Final = WatchedLayers((0, 1))
PROMPTS: Final = [np.random.default_rng(size).integers(0, VOCAB, size).tolist() for size in (2, 9, 70)]
WISHES: Final = [
    AttentionWish(top_k=5),
    AttentionWish(top_k=3, layers=(1, 0)),
    AttentionWish(top_k=8, layers=(0,), window=6),
]

by_one = partial(alone, watched=WATCHED)


class Recorded:
    """A runner, and all that it was given and gave back."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.batches: list[ForwardBatch] = []
        self.results: list[StepResult] = []

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        return self.sample(batch, self.logits(batch), sampling)()

    def logits(self, batch: ForwardBatch) -> Any:
        self.batches.append(batch)
        return self._runner.logits(batch)

    def sample(self, batch: ForwardBatch, logits: Any, sampling: SamplingBatch) -> WaitForResult:
        result = self._runner.sample(batch, logits, sampling)()
        self.results.append(result)
        return lambda: result


@pytest.fixture(scope="module")
def new_model(tiny_folder: Path) -> Callable[[int], tuple[Any, Recorded]]:
    def build(num_pages: int) -> tuple[Any, Recorded]:
        kv, runner = model_on(tiny_folder, num_pages)
        return kv, Recorded(runner)

    return build


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")
    return model.eval()


def params(wish: AttentionWish | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_MADE, "temperature": 0.0, "attention": wish, **fields})


@pytest.fixture(params=WAYS)
def answer(request: pytest.FixtureRequest, new_model: Any, make_pair: Any) -> Answer:
    return answer_in(request.param, new_model, make_pair, watched=WATCHED)


def told(outputs: Sequence[Output]) -> TokenAttention:
    told = [output.insight.attention for output in outputs if output.insight is not None]
    return join([each for each in told if each is not None])


def check(found: TokenAttention, attentions: Any, prompt_len: int, wish: AttentionWish) -> None:
    """Compare with transformers' `[1, num_heads, num_tokens, num_tokens]` of each layer."""
    assert found.layers == (wish.layers or (1,))
    places = np.array(found.positions).reshape(NUM_MADE, len(found.layers), wish.top_k)
    weights = np.array(found.weights).reshape(places.shape)
    for made in range(NUM_MADE):
        num_seen = prompt_len + made
        for number, layer in enumerate(found.layers):
            expected = attentions[layer][0].mean(dim=0)[num_seen - 1, :num_seen].numpy()
            first = max(0, num_seen - wish.window) if wish.window else 0
            best = first + np.argsort(-expected[first:])[: wish.top_k]
            listed, rest = places[made, number, : len(best)], places[made, number, len(best) :]
            assert listed.tolist() == best.tolist()
            np.testing.assert_allclose(weights[made, number, : len(best)], expected[best], atol=1e-4)
            assert (rest == NOBODY).all()


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_strongest_tokens_are_those_of_transformers(answer: Answer, reference: Any, rounds: int) -> None:
    """Requests that ask for other things, and one that asks for nothing, are computed together.

    Long prompts come in chunks, and in the second round from the cache.
    """
    asked = [(prompt, params(wish)) for wish in (*WISHES, None) for prompt in PROMPTS]
    answers = answer(asked, rounds=rounds)
    for room, (prompt, chosen) in enumerate(asked):
        made = tokens(answers[room])
        assert len(made) == NUM_MADE
        if chosen.attention is None:
            assert all(output.insight is None for output in answers[room])
            continue
        with torch.inference_mode():
            attentions = reference(torch.tensor([prompt + made]), output_attentions=True).attentions
        check(told(answers[room]), attentions, len(prompt), chosen.attention)


def test_a_replay_goes_on_with_positions_of_the_whole_text(answer: Answer) -> None:
    prompt, wish = PROMPTS[1], WISHES[1]
    whole = answer([(prompt, params(wish))])[0]
    rest = answer([(prompt + tokens(whole)[:2], params(wish, max_tokens=NUM_MADE - 2))], num_prior=2)[0]
    assert told(rest).positions == told(whole).span(2, NUM_MADE).positions


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_that_come_true_are_told_of_as_other_tokens(new_model: Any, make_pair: Any, overlap: bool) -> None:
    rooms, chosen = {room: PROMPTS[room % 3] for room in range(1, 7)}, params(WISHES[1], max_tokens=16)

    def serve(answers: dict[int, list[int]]) -> dict[int, list[Output]]:
        sizes = {"prefill_pages": NUM_PAGES, "decode_pages": NUM_PAGES, "vocab_size": VOCAB, "context_len": 256}
        pair = make_pair(**sizes, model=new_model, watched=WATCHED, overlap=overlap, drafter=Scripted(answers))
        for room, prompt in rooms.items():
            pair.start_with(chosen, room, prompt)
        pair.run()
        pair.close()
        return {room: [*pair.prefill.outputs[room][:1], *pair.decode.outputs[room]] for room in rooms}

    plain = serve({})
    drafted = serve({room: tokens(outputs) for room, outputs in plain.items()})
    assert max(len(output.token_ids) for outputs in drafted.values() for output in outputs) > 1
    for room in rooms:
        assert tokens(drafted[room]) == tokens(plain[room])
        assert told(drafted[room]).positions == told(plain[room]).positions
        np.testing.assert_allclose(told(drafted[room]).weights, told(plain[room]).weights, atol=1e-5)


def test_tokens_do_not_change_and_steps_carry_nothing_where_nobody_asks(new_model: Any) -> None:
    _, silent = new_model(NUM_PAGES)
    _, asking = new_model(NUM_PAGES)
    without = by_one(silent, [(prompt, params(None, logprobs=1)) for prompt in PROMPTS])
    withal = by_one(asking, [(prompt, params(WISHES[0], logprobs=1)) for prompt in PROMPTS])
    assert all(batch.insight is None for batch in silent.batches)
    assert all(result.insight is None for result in silent.results)
    assert any(batch.insight is not None for batch in asking.batches)
    for room in range(len(PROMPTS)):
        assert tokens(without[room]) == tokens(withal[room])
        assert [output.logprobs for output in without[room]] == [output.logprobs for output in withal[room]]


@pytest.mark.parametrize("watched", [WATCHED, WatchedLayers((), "of a reason")])
def test_what_can_not_be_watched_is_refused_in_words(watched: WatchedLayers) -> None:
    words = watched.refuse(AttentionWish(layers=(1, 2)))
    assert words is not None
    assert ("of a reason" if not watched.layers else "which are 0, 1; 2 is none") in words
    assert WATCHED.refuse(AttentionWish()) is None


def test_a_worker_refuses_a_layer_that_its_model_lacks(answer: Answer) -> None:
    (output,) = answer([(PROMPTS[0], params(AttentionWish(layers=(2,))))]).values()
    failure = output[-1].failure
    assert failure is not None
    assert failure.code is FailureCode.INVALID
    assert "attention_layers" in failure.message
