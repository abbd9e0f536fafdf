"""What drafts save: the same requests with `--speculate` and without, in turns, on the small model.

    python bench/speculation.py [--threads N] [--model smollm2] [--quick] [--json]

Both sides are whole scheduler cores over the same weights. *Told* answers are those of a capable model
(`speculation_prompts`): every step is computed in full, and its tokens are then those of the answer, since the small
model can't do such work. *Own* answers are the small model's, greedy, and must be the same on both sides, token for
token. A row's value is the decode speed with drafts, its limit the one without, from the second token on, by processor
time, which other work on the machine hardly changes; the peers say what it is by the clock. The best of several rounds
counts, each with a new drafter, which knows nothing of the round before. Then a random model most layers of which keep
a state, and a layer that predicts
one token more, of a model that is made for it. Then what a pair of real workers hands over
and reuses, with drafts and without.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import speculation_prompts as prompts
import sure_next_layer
import torch
from report import Report, arguments
from scheduler_pair import SchedulerPair

from diptych.architectures.config import DraftLayers
from diptych.checkpoints.source import ChangedModel, ModelSource, open_model
from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.drafting.ahead import AHEAD
from diptych.engine.drafting.new_drafter import new_drafter
from diptych.engine.options.config import EngineOptions
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.scheduler.stepping import SynchronousStepping
from diptych.engine.values.batch import ForwardBatch, SamplingBatch, StepResult
from diptych.engine.values.core_report import DraftReport
from diptych.engine.values.events import Emit, EmitTokens, Start
from diptych.engine.values.kv_regions import pages_per_state
from diptych.engine.values.limits import MAX_ROW_DRAFTS, PROMPT_ROWS, Limits
from diptych.engine.values.request import new_request
from diptych.engine.values.transfer_rules import TransferRules
from diptych.generation.sampling_params import SamplingParams
from diptych.kvtransfer.layout import PoolLayout
from diptych.tokens.tokenizer import Tokenizer
from diptych.unified.core import UnifiedCore

PAGE_SIZE = 16
NUM_PAGES = 1024
CONTEXT = 2048
MAX_STEP_TOKENS = 512
MAX_REQUESTS = 16 + PROMPT_ROWS
OUTPUT_TOKENS = 256  # at most
NUM_TURNS = 5  # of the conversation of the pair
TURN_TOKENS = 48  # of each answer


WITH_STATES: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a group of requests that ran together."""

    token_ids: Sequence[Sequence[int]]
    wall_s: float  # from the first step in which none computes its prompt
    cpu_s: float
    num_tokens: int  # in that time
    drafts: DraftReport


class Text(NamedTuple):
    """A request's tokens."""

    prompt: Sequence[int]
    answer: Sequence[int]


class Side:
    """A core of its own over the weights of the runner; serves groups of requests, one group after the other."""

    def __init__(self, runner: ModelRunner, source: ModelSource, speculate: str) -> None:
        """Layers that guess are the runner's."""
        self._runner = runner
        layout = layout_of(source)
        cache = KvCache(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            max_requests=MAX_REQUESTS,
            max_tokens_per_request=CONTEXT,
            pages_per_state=pages_per_state(source.config, 1, layout.dtype, layout),
        )
        limits = Limits(CONTEXT, source.config.vocab_size, frozenset(), MAX_STEP_TOKENS, 16)
        asks, model = AHEAD.get(speculate), runner.draft_model
        ahead = None if asks is None or model is None else asks(model, cache.page_table, PAGE_SIZE)
        drafter = new_drafter(speculate, limits, time.thread_time, ahead)
        self._core = UnifiedCore(cache, limits, TransferRules(), 0, Role.LOCAL, drafter=drafter)
        self._outputs: dict[int, list[int]] = {}
        self._num_ended = 0
        self._next_room = 1

    def serve(self, texts: Sequence[Text], *, is_told: bool) -> Served:
        whole = [[*text.prompt, *text.answer] for text in texts]
        runner = Reciter(self._runner, whole) if is_told else self._runner
        stepping = SynchronousStepping(self._core, runner, time.monotonic)
        rooms = [self._start(seed, text) for seed, text in enumerate(texts)]
        self._num_ended = 0
        while not all(len(self._outputs[room]) > 1 for room in rooms):
            stepping.advance(self._collect)
        num_before = sum(len(self._outputs[room]) for room in rooms)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        while self._num_ended < len(rooms):
            stepping.advance(self._collect)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        token_ids = [self._outputs.pop(room) for room in rooms]
        return Served(token_ids, wall_s, cpu_s, sum(map(len, token_ids)) - num_before, self._core.report().drafts)

    def _start(self, seed: int, text: Text) -> int:
        room, self._next_room = self._next_room, self._next_room + 1
        params = SamplingParams(max_tokens=len(text.answer), temperature=0.0, ignore_eos=True, seed=seed)
        self._outputs[room] = []
        self._core.handle(Start(new_request(room, np.array(text.prompt, np.int64), params)), time.monotonic())
        return room

    def _collect(self) -> None:
        for effect in self._core.pop_effects():
            match effect:
                case EmitTokens(rooms, _, token_ids):
                    for room, token_id in zip(rooms, token_ids, strict=True):
                        self._outputs[room] += token_id
                case Emit(output):
                    assert output.failure is None, output.failure
                    self._outputs[output.room] += output.token_ids
                    self._num_ended += output.finish is not None


class Reciter:
    """Computes steps in full, and then says the tokens of texts that are known, each by the seed of its request."""

    def __init__(self, runner: ModelRunner, texts: Sequence[Sequence[int]]) -> None:
        self._runner = runner
        self._texts = texts

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch) -> StepResult:
        self._runner.execute(batch, sampling)
        places = zip(sampling.seeds.tolist(), sampling.positions.tolist(), strict=True)
        return StepResult(np.array([self._texts[seed][at] for seed, at in places], np.int64))


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind, each with its prompt and the answer that it is told."""

    name: str
    texts: Sequence[Text]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    source = open_model(options.model)
    kinds = kinds_of(source.tokenizer())
    with Report(as_json=options.json) as report:

        def bench(weights: str, quantization: str) -> Bench:
            runner = new_runner(source, quantization, options.threads)
            return Bench(report, source, runner, weights, 1 if options.quick else options.rounds)

        if not options.quick:
            bench("float32", "none").alone(kinds, "suffix", is_told=True)
        stored = bench("as stored", "auto")
        stored.alone(kinds, "suffix", is_told=True)
        stored.beside(kinds)
        if not options.quick:
            stored.alone(kinds, "suffix", is_told=False)
            stored.alone(kinds, "ngram", is_told=True)
        bench_states(report, options.threads, 1 if options.quick else options.rounds)
        bench_next_layer(report, options.threads, 1 if options.quick else options.rounds)
        asyncio.run(bench_pair(report, options.model, source.tokenizer()))


def new_runner(
    source: ModelSource, quantization: str, num_threads: int, draft: ModelSource | None = None
) -> ModelRunner:
    return ModelRunner(
        source,
        torch.zeros(layout_of(source).shape),
        dtype="float32",
        num_threads=num_threads,
        quantization=quantization,
        draft=draft,
        max_requests=MAX_REQUESTS,
        row_tokens=1 + MAX_ROW_DRAFTS,
    )


def layout_of(source: ModelSource) -> PoolLayout:
    return ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype="float32")


def kinds_of(tokenizer: Tokenizer) -> Sequence[Kind]:
    asked = {
        "code edits": prompts.code_edits(),
        "JSON": prompts.json_records(),
        "quotes": prompts.quotes(),
        "prose": prompts.prose(),
    }
    return [Kind(name, [text_of(tokenizer, each) for each in requests]) for name, requests in asked.items()]


def text_of(tokenizer: Tokenizer, asked: prompts.Asked) -> Text:
    prompt = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": asked.prompt}]))
    return Text(prompt, tokenizer.encode(asked.answer)[:OUTPUT_TOKENS])


class Bench:
    """Compares drafts with none, over one set of weights."""

    def __init__(
        self,
        report: Report,
        source: ModelSource,
        runner: ModelRunner,
        weights: str,
        rounds: int,
        plain: ModelRunner | None = None,
    ) -> None:
        """`plain` serves without drafts; None: the same runner does."""
        self._report = report
        self._source = source
        self._runner = runner
        self._weights = weights
        self._rounds = rounds
        self._plain = plain or runner

    def alone(self, kinds: Sequence[Kind], speculate: str, *, is_told: bool) -> None:
        """Serve one request at a time."""
        whose = "told" if is_told else "own"
        for kind in kinds:
            name = f"{speculate}, {whose}, {kind.name}, weights {self._weights}"
            self._compare(name, speculate, [[text] for text in kind.texts], is_told=is_told)

    def beside(self, kinds: Sequence[Kind]) -> None:
        """Serve eight at once, that end together."""
        prose = [*kinds[-1].texts, *kinds[-1].texts]
        self._compare(f"suffix, told, 8 at once, prose, weights {self._weights}", "suffix", [prose], is_told=True)
        mixed = [text for kind in kinds for text in kind.texts[:2]]
        self._compare(
            f"suffix, told, 8 at once, two of each kind, weights {self._weights}", "suffix", [mixed], is_told=True
        )

    def by_next_layer(self, texts: Sequence[Text]) -> None:
        """Serve one request at a time, and then all at once."""
        name = f"mtp, own, a layer that is right, weights {self._weights}"
        self._compare(name, "mtp", [[text] for text in texts], is_told=False)
        self._compare(f"{name}, {len(texts)} at once", "mtp", [texts], is_told=False)

    def _compare(self, name: str, speculate: str, groups: Sequence[Sequence[Text]], *, is_told: bool) -> None:
        """Serve the groups with drafts and without, in turns."""
        runs: dict[str, list[Sequence[Served]]] = {"off": [], speculate: []}
        for _ in range(self._rounds):
            by = {"off": self._plain, speculate: self._runner}
            sides = {each: Side(runner, self._source, each) for each, runner in by.items()}
            served: dict[str, list[Served]] = {each: [] for each in runs}
            for group in groups:
                for each, side in sides.items():
                    served[each].append(side.serve(group, is_told=is_told))
            for one, other in zip(*served.values(), strict=True):
                assert one.token_ids == other.token_ids, f"{name}: tokens differ"
            for each, run in served.items():
                runs[each].append(run)
        self._say(name, *(min(each, key=lambda run: sum(one.cpu_s for one in run)) for each in runs.values()))

    def _say(self, name: str, without: Sequence[Served], drafted: Sequence[Served]) -> None:
        speed, plain_speed = _per_s(drafted), _per_s(without)
        drafts = drafted[-1].drafts
        accepted = sum(sum(each.accepted) for each in drafts.sources)
        peers = {
            "by the clock": sum(each.wall_s for each in without) / sum(each.wall_s for each in drafted),
            "accepted": accepted,
            "verified": sum(sum(each.verified) for each in drafts.sources),
            "of": sum(each.num_tokens for each in drafted),
            "us to ask": 1e6 * drafts.asking_s / max(1, drafts.num_asked),
        }
        self._report.row("speculation", name, speed, "token/s", plain_speed, "without", speed / plain_speed, peers)


def _per_s(served: Sequence[Served]) -> float:
    return sum(each.num_tokens for each in served) / sum(each.cpu_s for each in served)


def bench_next_layer(report: Report, num_threads: int, rounds: int) -> None:
    """Guess by a layer that predicts one token more and is right; the model is a random one otherwise."""
    with TemporaryDirectory() as folder:
        sizes = {"num_hidden_layers": 24, "first_k_dense_replace": 24, "intermediate_size": 2048, "head_dim": 64}
        source = open_model(str(sure_next_layer.write(Path(folder) / "sure", sure_next_layer.by_rows, 768, **sizes)))
        layer = source.next_layer()
        served = ChangedModel(
            source, replace(source.config, draft=DraftLayers(layer.config, layer.config.num_kv_heads))
        )
        random = np.random.default_rng(0)
        texts = [Text(random.integers(0, 768, 32).tolist(), [0] * 160) for _ in range(4)]
        runners = [new_runner(each, "none", num_threads, draft) for each, draft in ((served, layer), (source, None))]
        Bench(report, served, runners[0], "float32", rounds, runners[1]).by_next_layer(texts)


def bench_states(report: Report, num_threads: int, rounds: int) -> None:
    """Serve a random model three of four layers of which keep a state; answers are told, and repeat their prompts."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(WITH_STATES))
        source = open_model(folder, "dummy")
        random = np.random.default_rng(0)
        prompts = [random.integers(0, WITH_STATES["vocab_size"], 192).tolist() for _ in range(4)]
        texts = [Text(prompt, [*prompt[:80], 1, *prompt[81:]]) for prompt in prompts]
        runner = new_runner(source, "none", num_threads)
        bench = Bench(report, source, runner, "float32, layers with states", rounds)
        bench.alone([Kind("prompts once more", texts)], "suffix", is_told=True)


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
    text = list(text_of(tokenizer, prompts.code_edits()[0]).prompt)
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
