"""Runs in a pod of the image under test: clients that ask the small model and an adapter of it by turns.

What the model says is what it said first, of a few prompts: greedy answers do not change, and no answer of the adapter
is one of the model alone. Prints the lines of `traffic_pod.py`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from traffic_pod import Http, KeptHttp, Tally, asked_with, see_through

ADAPTER: Final = "sql"
PROMPTS: Final = ("The capital of France is", "Once upon a time", "Two and two are", "The opposite of cold is")
MAX_TOKENS: Final = 8

Answers = Mapping[tuple[str, str], str]  # by model and prompt


class Adapted(Http):
    model = ADAPTER


class KeptAdapted(KeptHttp):
    model = ADAPTER


def first_answers(model: Http, adapted: Http, tally: Tally) -> Answers:
    answers = {
        (ask.model, prompt): see_through(ask, prompt, MAX_TOKENS, tally)
        for ask in (model, adapted)
        for prompt in PROMPTS
    }
    for prompt in PROMPTS:
        assert answers[model.model, prompt] != answers[adapted.model, prompt], "the adapter changes nothing"
    return answers


def run_client(ask: Http, answers: Answers, tally: Tally) -> None:
    while True:
        for prompt in PROMPTS:
            _ask_once(ask, prompt, answers[ask.model, prompt], tally)


def _ask_once(ask: Callable[[str, int], str], prompt: str, right: str, tally: Tally) -> None:
    tally.count("offered")
    began_s = time.monotonic()
    try:
        text = see_through(ask, prompt, MAX_TOKENS, tally)
    except Exception as error:
        tally.count("failed", f"{ask.__class__.__name__}: {type(error).__name__}: {error}")
    else:
        tally.count(*(("answered",) if text == right else ("wrong", f"{prompt!r}: {text!r}, not {right!r}")))
    tally.took(time.monotonic() - began_s)


def main() -> None:
    host, port, hung_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[5])
    headers, tally = asked_with(os.environ), Tally()
    clients = [kind(host, port, headers, hung_s) for kind in (Http, Adapted, KeptHttp, KeptAdapted)]
    answers = first_answers(clients[0], clients[1], tally)
    for client in clients:
        threading.Thread(target=run_client, args=(client, answers, tally), daemon=True).start()
    while True:
        time.sleep(1)
        print(tally.line(), flush=True)


if __name__ == "__main__":
    main()
