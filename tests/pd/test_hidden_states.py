"""The hidden state behind each output token, by one worker and by a pair: as transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from answers import NUM_PAGES, PAGE_SIZE, VOCAB, WAYS, Answer, answer_in, model_on, tokens
from every_kind import Scripted

from diptych.checkpoints.source import open_model
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.kv_regions import pages_per_state
from diptych.engine.values.watched_layers import ToldStates, WatchedLayers, told_states
from diptych.generation.attention_tokens import AttentionWish
from diptych.generation.insight import MAX_STATE_VALUES, join
from diptych.generation.output import FailureCode, Output
from diptych.generation.sampling_params import SamplingParams

NUM_MADE: Final = 5
WATCHED: Final = WatchedLayers((1,))
PROMPTS: Final = [np.random.default_rng(size).integers(0, VOCAB, size).tolist() for size in (2, 9, 70)]
KINDS: Final = ("tiny_folder", "tiny_experts_folder", "tiny_recurrent_folder")
WITH_ATTENTION: Final = {"attention": AttentionWish(3, (1,))}
WISHES: Final[list[dict[str, Any]]] = [{"hidden_states": True}, {"hidden_states": True, **WITH_ATTENTION}, {}]


class Kind(NamedTuple):
    """A model, as both sides have it."""

    new_model: Callable[[int], tuple[Any, ModelRunner]]
    reference: Any  # transformers' model
    options: dict[str, Any]

    def expected(self, prompt: list[int], made: list[int]) -> Any:
        with torch.inference_mode():
            states = self.reference(torch.tensor([prompt + made]), output_hidden_states=True).hidden_states[-1][0]
        return states[len(prompt) - 1 : -1].numpy()


@pytest.fixture(scope="module")
def kinds() -> dict[Path, Kind]:
    """Those that were loaded."""
    return {}


@pytest.fixture
def kind(request: pytest.FixtureRequest, kinds: dict[Path, Kind]) -> Kind:
    folder: Path = request.getfixturevalue(getattr(request, "param", "tiny_folder"))
    return kinds.setdefault(folder, _kind(folder))


def _kind(folder: Path) -> Kind:
    config = open_model(str(folder)).config
    layout = ModelRunner.pool_layout(config, num_pages=1, page_size=PAGE_SIZE, dtype="float32")
    states, per_state = told_states(config, "cpu", 1), pages_per_state(config, 1, "float32", layout)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    options = {"watched": WATCHED, "states": states, "pages_per_state": per_state}
    return Kind(lambda num_pages: model_on(folder, num_pages), load(folder).eval(), options)


@pytest.fixture
def answer(request: pytest.FixtureRequest, kind: Kind, make_pair: Any) -> Answer:
    return answer_in(getattr(request, "param", "a pair"), kind.new_model, make_pair, **kind.options)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_MADE, "temperature": 0.0, **fields})


def told(outputs: Sequence[Output]) -> Any:
    """Return `[num_tokens, hidden_size]`; there is a row for each token of an output."""
    parts = [output.insight for output in outputs if output.insight is not None]
    states = [part.hidden_states for part in parts]
    assert [len(output.token_ids) for output in outputs if output.token_ids] == [
        len(each.rows()) for each in states if each is not None
    ]
    whole = join(parts).hidden_states
    assert whole is not None
    return np.array(whole.rows())


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("answer", WAYS[1:], indirect=True)
def test_hidden_states_are_those_of_transformers(answer: Answer, kind: Kind) -> None:
    """Requests that ask for more, or for nothing, are beside them; long prompts come in chunks, and then are cached."""
    asked = [(prompt, params(**wish)) for wish in WISHES for prompt in PROMPTS]
    answers = answer(asked, rounds=2)
    for room, (prompt, chosen) in enumerate(asked):
        made, parts = tokens(answers[room]), [output.insight for output in answers[room] if output.token_ids]
        assert [each is not None and each.attention is not None for each in parts] == [bool(chosen.attention)] * len(
            parts
        )
        if chosen.hidden_states:
            np.testing.assert_allclose(told(answers[room]), kind.expected(prompt, made), atol=1e-3)
        else:
            assert parts == [None] * len(parts)


def test_a_replay_goes_on_with_the_states_of_the_whole_text(answer: Answer, kind: Kind) -> None:
    made = tokens(answer([(PROMPTS[1], params())])[0])
    asked = [(PROMPTS[1] + made[:2], params(hidden_states=True, max_tokens=NUM_MADE - 2))]
    rest = answer(asked, num_prior=2)[0]
    assert tokens(rest) == made[2:]
    np.testing.assert_allclose(told(rest), kind.expected(PROMPTS[1], made)[2:], atol=1e-3)


def test_drafts_that_come_true_have_states_as_other_tokens(kind: Kind, make_pair: Any) -> None:
    rooms, chosen = dict(enumerate(PROMPTS, 1)), params(hidden_states=True, max_tokens=16)

    def serve(answers: dict[int, list[int]]) -> dict[int, list[Output]]:
        sizes = {"prefill_pages": NUM_PAGES, "decode_pages": NUM_PAGES, "vocab_size": VOCAB, "context_len": 256}
        pair = make_pair(**sizes, model=kind.new_model, drafter=Scripted(answers), overlap=True, **kind.options)
        for room, prompt in rooms.items():
            pair.start_with(chosen, room, prompt)
        pair.run()
        pair.close()
        return {room: [*pair.prefill.outputs[room][:1], *pair.decode.outputs[room]] for room in rooms}

    drafted = serve({room: tokens(outputs) for room, outputs in serve({}).items()})
    assert max(len(output.token_ids) for outputs in drafted.values() for output in outputs) > 1
    for room, prompt in rooms.items():
        made = tokens(drafted[room])
        np.testing.assert_allclose(told(drafted[room]), kind.expected(prompt, made), atol=1e-3)


def test_a_worker_refuses_what_it_can_not_keep(answer: Answer, kind: Kind) -> None:
    """One number more than may be is too many."""
    most = MAX_STATE_VALUES // 64
    (output,) = answer([(PROMPTS[0], params(hidden_states=True, max_tokens=most + 1))]).values()
    failure = output[-1].failure
    assert failure is not None
    assert failure.code is FailureCode.INVALID
    assert f"not 64 * {most + 1} * 1" in failure.message
    states: ToldStates = kind.options["states"]
    assert states.refuse(most) is None


def test_a_worker_says_why_it_tells_no_states(tiny_folder: Path) -> None:
    config = open_model(str(tiny_folder)).config
    for device, tp, words in (("cuda", 1, "--device cpu"), ("cpu", 2, "--tp 1"), ("sim", 1, "simulated")):
        assert words in (told_states(config, device, tp).refuse(1) or "")
