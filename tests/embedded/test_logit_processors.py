"""The operator's own code changes logits, on both sides of a pair of real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError, DiptychError, InvalidRequest
from diptych.embedded.engine import Generation
from diptych.engine import Engine, EngineOptions, SamplingParams
from diptych.engine.options.logit_processors import load_processors
from diptych.generation.logit_processor import ProcessorChoice

CODE = """
import math

def cycle(logits, prompt, output, params):
    chosen = params["tokens"][(len(prompt) + len(output)) % len(params["tokens"])]
    logits.fill_(-math.inf)
    logits[chosen] = 0.0

def fail_late(logits, prompt, output, params):
    assert len(output) < 3, "enough"

def leave(logits, prompt, output, params):
    raise SystemExit(3)

def allow_none(logits, prompt, output, params):
    logits.fill_(-math.inf)
"""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7]
OPTIONS = tuple(
    f"{name}=changes_logits:{function}"
    for name, function in (("cycle", "cycle"), ("late", "fail_late"), ("leave", "leave"), ("none", "allow_none"))
)


def asking(name: str, params: str = "{}", **fields: object) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields},  # type: ignore[arg-type]
        processor=ProcessorChoice(name, params),
    )


@pytest.fixture(scope="module")
def pair(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("code")
    (folder / "changes_logits.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        options = EngineOptions(kv_cache_mib=4, logit_processors=OPTIONS, speculate="suffix")
        with Engine(str(tiny_folder), options, prefill=1, decode=1) as engine:
            yield engine


def test_a_request_that_names_a_processor_follows_it_and_its_company_does_not(pair: Engine) -> None:
    plain = pair.generate(PROMPT, GREEDY).token_ids
    chosen = asking("cycle", '{"tokens": [3, 40, 63]}', temperature=1.5)

    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(pair.async_generate(PROMPT, each) for each in [chosen, GREEDY] * 2))

    answers = asyncio.run(all_at_once())
    assert [list(each.token_ids) for each in answers] == [[3, 40, 63, 3, 40, 63, 3, 40], [*plain]] * 2


def test_a_processor_has_the_last_word_but_for_what_forbids_tokens(pair: Engine) -> None:
    chosen = asking("cycle", '{"tokens": [3]}', logit_bias={9: 100.0})
    assert set(pair.generate(PROMPT, chosen).token_ids) == {3}


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (asking("late"), "custom_logit_processor 'late' failed: AssertionError: enough"),
        (asking("cycle"), "custom_logit_processor 'cycle' failed: KeyError: 'tokens'"),
        (asking("leave"), "custom_logit_processor 'leave' failed: SystemExit: 3"),
        (asking("none"), "custom_logit_processor 'none' left no token that may come next"),
        (
            asking("cycle", '{"tokens": [3]}', allowed_token_ids=(4,)),
            "custom_logit_processor 'cycle' left no token that may come next",
        ),
        (asking("mine"), "custom_logit_processor 'mine' is not one that this worker has"),
        (asking("cycle", "[]"), "custom_params must be a JSON object"),
        (asking("cycle", "{"), "custom_params is no JSON"),
        (asking(""), "custom_logit_processor is a name of 1 to 64 characters"),
    ],
)
def test_a_processor_that_fails_or_is_not_there_ends_its_request_in_words(
    pair: Engine, chosen: SamplingParams, words: str
) -> None:
    with pytest.raises(DiptychError) as raised:
        pair.generate(PROMPT, chosen)
    assert words in str(raised.value)
    assert isinstance(raised.value, InvalidRequest)
    assert len(pair.generate(PROMPT, GREEDY).token_ids) == 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("a",), "takes NAME=MODULE:FUNCTION, not 'a'"),
        (("a=os:path:x", "a=os:sep"), "has two of the name 'a'"),
        (("a=no.such.module:f",), "is not to be had: No module named 'no'"),
        (("a=math:no_such",), "is not to be had: module 'math' has no attribute"),
        (("a=math:pi",), "can't be called"),
    ],
)
def test_code_that_cannot_be_called_is_refused_at_the_start(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_processors(given)
