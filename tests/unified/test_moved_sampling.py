"""What an output depends on beside its KV goes with it: draws, penalties, masks, grammars, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sure_next_layer
import torch
from draft_models import AskAlways, runner_with_draft, with_draft
from eagle_heads import AskHead, by_rows, open_both, sure_folders
from next_layers import AskNextLayer, with_next

from diptych.checkpoints.source import open_model
from diptych.common.members.roles import LegKind, Role
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.grammar_thread import GrammarThread
from diptych.engine.values.events import CompileGrammar, Move, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.output import Output
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.compiler import Compiler
from diptych.router.values.progress import params_after
from diptych.tokens.tokenizer import Tokenizer

Fleet = Any  # the fixture's class: test helpers can't be imported

VOCAB, PAGE, EOS = 321, 4, 5
OLD, NEW = 1, 2  # rooms, and workers
MAX_TOKENS = 24
PROMPT = np.random.default_rng(3).integers(6, VOCAB, 21).tolist()
LIMITS = Limits(256, VOCAB, frozenset({EOS}), max_step_tokens=24, max_requests=8)
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "top": {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "seed": 4},
    "bias": {"logit_bias": {9: 4.0, 11: -100.0}, "temperature": 0.8, "seed": 2},
    "min_tokens": {"min_tokens": 20, "logit_bias": {EOS: 50.0}},
    "allowed": {"allowed_token_ids": tuple(range(40, 90)), "temperature": 1.0, "seed": 5},
    "logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 6},
    "stop": {"logit_bias": {17: 100.0}, "stop_token_ids": (17,), "min_tokens": 20, "temperature": 2.0, "seed": 11},
}


@pytest.fixture
def new_model(tiny_folder: Path) -> Callable[[int], tuple[Any, ModelRunner]]:
    def build(num_pages: int) -> tuple[Any, ModelRunner]:
        source = open_model(str(tiny_folder))
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
        kv = np.full(layout.shape, np.nan, np.float32)
        return kv, ModelRunner(source, torch.from_numpy(kv), dtype="float32")

    return build


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "temperature": 0.0, **fields})


def start(fleet: Fleet, worker: int, room: int, prompt: list[int], chosen: SamplingParams, **leg: Any) -> None:
    prior = leg.pop("num_prior_output_tokens", 0)
    request = new_request(room, np.array(prompt, dtype=np.int64), chosen, num_prior_output_tokens=prior)
    fleet.workers[worker].core.handle(Start(request, **leg), 0.0)


def merged(fleet: Fleet, old: int = OLD, new: int = NEW) -> list[Output]:
    """The outputs of the old room, then those of the new worker, all with tokens."""
    first, second = fleet.workers[OLD].outputs[old], fleet.workers[NEW].outputs[new]
    return [output for output in (*first, *second) if output.token_ids]


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs(outputs: list[Output]) -> list[float]:
    return [value for output in outputs if output.logprobs for value in output.logprobs.logprobs]


def move(fleet: Fleet, chosen: SamplingParams, num_tokens: int, old: int = OLD, new: int = NEW) -> None:
    """Have the output go on at the new worker behind so many tokens, if it has as many."""
    while len(tokens(merged(fleet, old, new))) < num_tokens and fleet.advance(OLD):
        pass
    fleet.workers[OLD].core.handle(Move(new, old, NEW), 0.0)
    while not fleet.workers[OLD].outputs[new]:
        fleet.advance(OLD)
    if fleet.workers[OLD].outputs[new][0].failure is not None:
        return  # it had ended
    known = tokens(merged(fleet, old, new))[:-1]
    rest = params_after(chosen, len(known))
    start(fleet, NEW, new, PROMPT + known, rest, peer=OLD, kind=LegKind.DECODE, num_prior_output_tokens=len(known))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_output_that_moves_is_the_one_that_stays(fleet_class: type[Fleet], new_model: Any, overlap: bool) -> None:
    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, model=new_model, limits=LIMITS, overlap=overlap, num_pages=256)
    for number, fields in enumerate(ASKED.values()):
        chosen, old, new, stays = params(**fields), 3 * number + 1, 3 * number + 2, 3 * number + 3
        start(fleet, OLD, stays, PROMPT, chosen, kind=LegKind.LOCAL)
        fleet.run()
        start(fleet, OLD, old, PROMPT, chosen, kind=LegKind.LOCAL)
        move(fleet, chosen, 2 + number, old, new)
        fleet.run()
        right, made = merged(fleet, stays, 0), merged(fleet, old, new)
        assert tokens(made) == tokens(right)
        ends = [fleet.workers[worker].outputs[room][-1].finish for worker, room in ((NEW, new), (OLD, stays))]
        assert ends[0] == ends[1] is not None
        assert logprobs(made) == pytest.approx(logprobs(right), abs=1e-4)
    fleet.close()


@pytest.mark.parametrize("asks", [AskAlways, AskNextLayer, AskHead])
def test_an_output_that_moves_takes_its_draft_layers_along(
    fleet_class: type[Fleet], tiny_folder: Path, tmp_path: Path, asks: type[AskAlways]
) -> None:
    """Who is always right is so at the old worker, at the new one, and when both have other roles.

    That is a model that guesses for itself, and a next layer or a head whose model is made for it.
    """
    models, drafters = list[ModelRunner](), [asks(), asks()]
    if asks is AskNextLayer:
        source = with_next(open_model(str(sure_next_layer.write(tmp_path / "sure", sure_next_layer.by_rows))))
        draft = source.next_layer()
    elif asks is AskHead:
        source, draft = open_both(sure_folders(tmp_path, by_rows))
    else:
        draft = open_model(str(tiny_folder))
        source = with_draft(draft, draft)

    def new_model(num_pages: int) -> tuple[Any, ModelRunner]:
        layout = ModelRunner.pool_layout(source.config, num_pages=num_pages, page_size=PAGE, dtype="float32")
        kv = torch.full(layout.shape, torch.nan)
        models.append(runner_with_draft(source, draft, kv))
        return kv.numpy(), models[-1]

    fleet = fleet_class(Role.UNIFIED, Role.UNIFIED, model=new_model, limits=LIMITS, num_pages=256, drafters=drafters)
    for drafter, model, worker in zip(drafters, models, fleet.workers.values(), strict=True):
        drafter.begin(model.draft_model, worker.cache)
    start(fleet, NEW, 9, PROMPT, params(), kind=LegKind.LOCAL)
    fleet.run()
    start(fleet, OLD, OLD, PROMPT, params(), kind=LegKind.LOCAL)
    move(fleet, params(), 7)
    fleet.run()
    assert tokens(merged(fleet)) == tokens(fleet.workers[NEW].outputs[9])
    fleet.serve(OLD, Role.DECODE)
    fleet.serve(NEW, Role.PREFILL)
    fleet.run()
    fleet.start(10, [*PROMPT, 1], NEW, OLD, max_tokens=MAX_TOKENS)
    fleet.run()
    for drafter in drafters:
        assert drafter.came == drafter.compared > 15
    assert drafters[0].num_first > 0, "the row before the first token came with the hand-off"
    fleet.close()


@pytest.fixture
def grammars(byte_tokenizer: Tokenizer) -> Iterator[GrammarThread]:
    thread = GrammarThread(lambda: Compiler(byte_tokenizer, 1000, byte_tokenizer.eos_ids))
    yield thread
    thread.close()


@pytest.mark.integration
@pytest.mark.parametrize("num_tokens", [2, 5, 9])
def test_a_grammar_goes_on_where_it_stood(
    fleet_class: type[Fleet], grammars: GrammarThread, byte_tokenizer: Tokenizer, num_tokens: int
) -> None:
    class Constrained(fleet_class):  # type: ignore[misc]
        def _perform(self, number: int, worker: Any, effect: object) -> None:
            if not isinstance(effect, CompileGrammar):
                super()._perform(number, worker, effect)
                return
            grammars.submit(effect)
            while not (events := grammars.poll()):
                assert wait([grammars.fileno()], 200), "it was never compiled"
            for event in events:
                worker.core.handle(event, 0.0)

    chosen = params(grammar=Grammar(GrammarKind.REGEX, "[A-Z]{4}-[0-9]{8}"))
    fleet = Constrained(Role.UNIFIED, Role.UNIFIED)
    start(fleet, OLD, OLD, PROMPT, chosen, kind=LegKind.LOCAL)
    move(fleet, chosen, num_tokens)
    fleet.run()
    text = byte_tokenizer.decode(tokens(merged(fleet)))
    assert (len(text), text[4]) == (13, "-")
    assert fleet.workers[NEW].outputs[NEW][-1].finish is not None
