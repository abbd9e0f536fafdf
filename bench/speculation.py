"""What drafts save: the same requests with `--speculate` and without, in turns, on the small model.

    python bench/speculation.py [--threads N] [--model smollm2] [--quick] [--json]

Both sides are whole scheduler cores over the same weights; each output must be the same, token for token. A row's value
is the decode speed with drafts, its limit the one without, from the first token on; the ratio is theirs, of the seconds
of processor time that the process took, which other work on the machine hardly changes (the peers say that of the
clock). The best of several rounds counts, each with a new drafter, which so knows nothing of answers of the round before.
Then what drafting itself takes, and what a pair of real workers hands over and reuses with drafts and without.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import speculation_prompts as prompts
import torch
from report import Report, arguments
from scheduler_pair import SchedulerPair

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.drafting.new_drafter import new_drafter
from diptych.engine.options.config import EngineOptions, Speculate
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.stepping import SynchronousStepping
from diptych.engine.values.core_report import DraftReport
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.limits import Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.tokenizer import Tokenizer
from diptych.unified.core import UnifiedCore

PAGE_SIZE = 16
NUM_PAGES = 1024
CONTEXT = 2048
MAX_STEP_TOKENS = 512
OUTPUT_TOKENS = 160
NUM_TURNS = 5  # of the conversation of the pair
TURN_TOKENS = 48  # of each answer


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a group of requests that ran together."""

    token_ids: Sequence[Sequence[int]]
    wall_s: float  # from the first step in which none computes its prompt
    cpu_s: float
    num_tokens: int  # in that time
    drafts: DraftReport


class Side:
    """A core of its own over the weights of the runner; serves groups of requests, one group after the other."""

    def __init__(self, runner: ModelRunner, source: ModelSource, speculate: Speculate) -> None:
        cache = KvCache(
            num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_requests=16, max_tokens_per_request=CONTEXT
        )
        limits = Limits(CONTEXT, source.config.vocab_size, frozenset(), MAX_STEP_TOKENS, 16)
        drafter = new_drafter(speculate, limits, time.monotonic)
        self._core = UnifiedCore(cache, limits, TransferRules(), 0, Role.LOCAL, drafter=drafter)
        self._stepping = SynchronousStepping(self._core, runner, time.monotonic)
        self._outputs: dict[int, list[int]] = {}
        self._num_ended = 0
        self._next_room = 1

    def serve(self, texts: Sequence[Sequence[int]], num_tokens: int) -> Served:
        rooms = [self._start(text, num_tokens) for text in texts]
        self._num_ended = 0
        while not all(len(self._outputs[room]) > 1 for room in rooms):
            self._stepping.advance(self._collect)
        num_before = sum(len(self._outputs[room]) for room in rooms)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        while self._num_ended < len(rooms):
            self._stepping.advance(self._collect)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        token_ids = [self._outputs.pop(room) for room in rooms]
        return Served(token_ids, wall_s, cpu_s, sum(map(len, token_ids)) - num_before, self._core.report().drafts)

    def _start(self, text: Sequence[int], num_tokens: int) -> int:
        room, self._next_room = self._next_room, self._next_room + 1
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self._outputs[room] = []
        self._core.handle(Start(new_request(room, np.array(text, np.int64), params)), time.monotonic())
        return room

    def _collect(self) -> None:
        for effect in self._core.pop_effects():
            match effect:
                case EmitTokens(rooms, _, token_ids):
                    for room, token_id in zip(rooms, token_ids, strict=True):
                        self._outputs[room].append(token_id)
                case Emit(output):
                    assert output.failure is None, output.failure
                    self._outputs[output.room] += output.token_ids
                    self._num_ended += output.finish is not None


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    source = open_model(options.model)
    rounds, num_tokens = (1, 96) if options.quick else (3, OUTPUT_TOKENS)
    with Report(as_json=options.json) as report:
        for quantization in ("as stored",) if options.quick else ("as stored", "float32"):
            runner = new_runner(source, quantization, options.threads)
            bench_texts(report, runner, source, quantization, rounds, num_tokens)
        asyncio.run(bench_pair(report, options.model, source.tokenizer()))


def new_runner(source: ModelSource, quantization: str, num_threads: int) -> ModelRunner:
    layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")
    kv = torch.zeros(layout.shape)
    how = "auto" if quantization == "as stored" else "none"
    return ModelRunner(source, kv, dtype="float32", num_threads=num_threads, quantization=how)


def bench_texts(
    report: Report, runner: ModelRunner, source: ModelSource, quantization: str, rounds: int, num_tokens: int
) -> None:
    tokenizer = source.tokenizer()
    kinds = {
        "code edits": [tokenizer.encode(text) for text in prompts.code_edits()],
        "JSON": [tokenizer.encode(text) for text in prompts.json_records()],
        "quotes": [tokenizer.encode(text) for text in prompts.quotes()],
        "prose": [chat(tokenizer, text) for text in prompts.stories()],
    }
    for speculate in ("suffix", "ngram"):
        for kind, texts in kinds.items():
            compare(report, runner, source, speculate, [[text] for text in texts], rounds, num_tokens, kind, quantization)
    every = [text for texts in kinds.values() for text in texts]
    compare(report, runner, source, "suffix", [every[:8]], rounds, num_tokens, "8 at once of all kinds", quantization)
    compare(report, runner, source, "suffix", [kinds["prose"] * 2], rounds, num_tokens, "8 at once, prose", quantization)


def chat(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    return tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]))


def compare(
    report: Report,
    runner: ModelRunner,
    source: ModelSource,
    speculate: Speculate,
    groups: Sequence[Sequence[Sequence[int]]],
    rounds: int,
    num_tokens: int,
    kind: str,
    quantization: str,
) -> None:
    """Serve the groups with drafts and without, in turns."""
    best: dict[str, list[Served]] = {}
    for _ in range(rounds):
        sides = {"off": Side(runner, source, "off"), speculate: Side(runner, source, speculate)}
        served: dict[str, list[Served]] = {name: [] for name in sides}
        for group in groups:
            for name, side in sides.items():
                served[name].append(side.serve(group, num_tokens))
        for one, other in zip(*served.values(), strict=True):
            assert one.token_ids == other.token_ids, f"{kind}: tokens differ"
        for name, each in served.items():
            best[name] = min(best.get(name, each), each, key=lambda run: sum(one.cpu_s for one in run))
    without, drafted = best["off"], best[speculate]
    speed, plain_speed = _per_s(drafted), _per_s(without)
    drafts = drafted[-1].drafts
    accepted, verified = (sum(sum(getattr(each, name)) for each in drafts.sources) for name in ("accepted", "verified"))
    wall = sum(each.wall_s for each in without) / sum(each.wall_s for each in drafted)
    asking_us = 1e6 * drafts.asking_s / max(1, drafts.num_asked)
    peers = {"by the clock": wall, "accepted": accepted, "of": verified, "us to ask": asking_us}
    case = f"{speculate}, {kind}, weights {quantization}"
    report.row("speculation", case, speed, "token/s", plain_speed, "without", speed / plain_speed, peers)


def _per_s(served: Sequence[Served]) -> float:
    return sum(each.num_tokens for each in served) / sum(each.cpu_s for each in served)


async def bench_pair(report: Report, model: str, tokenizer: Tokenizer) -> None:
    """Hold a conversation on a pair without drafts, and on one whose decode worker alone drafts."""
    engine = EngineOptions(model=model, kv_cache_mib=128, page_size=PAGE_SIZE, max_step_tokens=128)
    plain = await converse(engine, engine, tokenizer)
    drafted = await converse(engine, replace(engine, speculate="suffix"), tokenizer)
    assert plain.token_ids == drafted.token_ids, "a pair's tokens differ"
    for name, value, limit in zip(Conversation.NAMES, drafted.counts, plain.counts, strict=True):
        report.row("speculation pair", name, value, "", limit, "without", value / limit if limit else math.nan)
    report.row("speculation pair", "guesses that came true", drafted.num_accepted, "token")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a pair did."""

    NAMES = ("prompt tokens found cached", "bytes handed over", "pages handed over")
    token_ids: Sequence[Sequence[int]]
    counts: Sequence[int]
    num_accepted: int


async def converse(prefill: EngineOptions, decode: EngineOptions, tokenizer: Tokenizer) -> Conversation:
    text = list(tokenizer.encode(prompts.code_edits()[0]))
    answers, cached, num_bytes, num_pages = [], 0, 0, 0
    async with SchedulerPair(prefill, TransferRules(), decode_engine=decode) as pair:
        for turn in range(1, NUM_TURNS + 1):
            first, others = await pair.request(turn, text, TURN_TOKENS)
            assert first.last is not None
            answers.append([*first.token_ids, *others.token_ids])
            cached += first.last.stats.cached_tokens
            num_bytes += first.last.stats.bytes_moved
            num_pages += first.last.stats.pages_moved
            text += answers[-1] + tokenizer.encode("\n\nOnce more, please:\n\n")
        drafting = (await pair.decode.ask_status()).drafting
    num_accepted = sum(sum(each.accepted) for each in drafting.sources)
    return Conversation(answers, (cached, num_bytes, num_pages), num_accepted)


if __name__ == "__main__":
    main()
