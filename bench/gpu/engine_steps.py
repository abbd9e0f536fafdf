"""Decode steps under a worker's own scheduler, in this process: its loop, its core, its way of stepping, one runner."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Final

import zmq
from forward_batches import PAGE_SIZE
from llama_8b import CONTEXT_LEN
from model_steps import MAX_REQUESTS, MAX_STEP_TOKENS
from step_marks import WARM_STEPS, Marks, Pace

from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.lora.registry import NONE, Loaded
from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.scheduler.links.links import links_of_nobody
from diptych.engine.scheduler.loop import Parts, SchedulerLoop
from diptych.engine.scheduler.news import News
from diptych.engine.scheduler.stepping import OverlappedStepping, QueuedSteps, Stepping, StepWatch
from diptych.engine.values.batch import OverlapRunner
from diptych.engine.values.events import CompileGrammar
from diptych.engine.values.limits import PROMPT_ROWS, Limits
from diptych.engine.values.transfer_rules import TransferRules
from diptych.unified.core import UnifiedCore
from diptych.v1 import admin_pb2, engine_pb2, inference_pb2, worker_pb2

VOCAB_SIZE: Final = 128256
SLACK: Final = 64  # tokens that requests want beyond the steps that are measured


class Quiet:
    """Grammars, admin commands and adapters of a scheduler that nobody asks for any."""

    def __init__(self) -> None:
        self._never = os.eventfd(0)
        self.turns = AdapterTurns(0)

    def fileno(self) -> int:
        return self._never

    def submit(self, wanted: CompileGrammar | admin_pb2.AdminCommand) -> None:
        raise AssertionError(wanted)

    def drop(self, room: int) -> None:
        pass

    def poll(self) -> tuple[()]:
        return ()

    def news(self) -> None:
        return None

    def start(self, room: int, name: str) -> Loaded:
        return NONE

    def end(self, room: int) -> None:
        pass


class Until:
    """Steps until enough is marked, then has the loop shut down."""

    def __init__(self, stepping: Stepping, marks: Marks, shut_down: Callable[[], None]) -> None:
        self._stepping = stepping
        self.meter = stepping.meter
        self._marks = marks
        self._shut_down = shut_down

    def advance(self, perform: Callable[[], None]) -> bool:
        if self._marks.is_full:
            self._shut_down()
        return self._stepping.advance(perform)

    def close(self) -> None:
        self._stepping.close()


def engine_pace(runner: OverlapRunner, num_pages: int, batch_size: int, context: int, num_steps: int) -> Pace:
    """Return the pace of steps of requests that have `context` tokens in the middle of them; they share no prefix."""
    marks = Marks(runner, num_steps, batch_size)
    cache = KvCache(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_requests=MAX_REQUESTS + PROMPT_ROWS,
        max_tokens_per_request=CONTEXT_LEN,
    )
    limits = Limits(CONTEXT_LEN, VOCAB_SIZE, frozenset(), MAX_STEP_TOKENS, MAX_REQUESTS)
    core = UnifiedCore(cache, limits, TransferRules(), 0, Role.LOCAL)
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend, channel = (zmq_context.socket(zmq.PAIR) for _ in range(2))
    for socket in (frontend, channel):
        socket.set_hwm(0)
    frontend.bind("inproc://scheduler")
    channel.connect("inproc://scheduler")
    legs = _legs(batch_size, context - num_steps // 2 - WARM_STEPS, num_steps + WARM_STEPS + SLACK)
    frontend.send(engine_pb2.SchedulerCommands(start=legs).SerializeToString())
    stop = engine_pb2.SchedulerCommands(shutdown=True).SerializeToString()
    steps = OverlappedStepping(core, QueuedSteps(marks), time.monotonic)
    stepping, links = Until(steps, marks, lambda: frontend.send(stop)), links_of_nobody()
    quiet: Any = Quiet()
    parts = Parts(links, quiet, quiet, quiet, StepWatch())
    SchedulerLoop(core, stepping, channel, parts, News(core, cache, links, quiet, stepping.meter)).run()
    zmq_context.destroy(linger=0)
    return marks.pace()


def _legs(batch_size: int, prompt_len: int, max_tokens: int) -> list[worker_pb2.StartLeg]:
    rng = random.Random(prompt_len)
    sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, top_p=1, ignore_eos=True)
    return [
        worker_pb2.StartLeg(
            room=room + 1, prompt_token_ids=[rng.randrange(2, 100_000) for _ in range(prompt_len)], sampling=sampling
        )
        for room in range(batch_size)
    ]
