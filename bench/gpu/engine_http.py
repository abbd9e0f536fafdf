"""Asks a case through HTTP, one connection a request, from several processes: one client could not read so many tokens.

python engine_http.py PORT MODEL PART PARTS     (started by whole_engines.py: a line `Asked` in, a line of stamps out)

It says `ready` when the bodies are made, and asks when another line comes. An event counts once, with all its tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import orjson
import uvloop
from engine_cases import Asked, Request
from pd_load import Served, ask


def body(model: str, request: Request) -> bytes:
    options = {"max_tokens": request.num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return orjson.dumps({"model": model, "prompt": request.token_ids, "stream": True, **options})


async def run(port: int, bodies: list[bytes]) -> list[Served]:
    now_s = time.perf_counter()
    return list(await asyncio.gather(*(ask(port, each, now_s) for each in bodies)))


def failure_of(served: Served, request: Request) -> str:
    missing = request.num_tokens - served.num_tokens
    return served.failure or (f"{missing} of {request.num_tokens} tokens are missing" if missing else "")


def main(port: int, model: str, part: int, parts: int) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # `sys.stdout` may be unbuffered: it loses what a signal cuts
    for line in iter(sys.stdin.readline, ""):
        requests = Asked(**json.loads(line)).requests()[part::parts]
        bodies = [body(model, each) for each in requests]
        print("ready", file=answers, flush=True)
        sys.stdin.readline()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            served = runner.run(run(port, bodies))
        failures = [failure_of(each, request) for each, request in zip(served, requests, strict=True)]
        answer = {"stamps": [each.stamps_s for each in served], "failures": [each for each in failures if each][:1]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]))
