"""What structured output costs: checking and compiling a grammar, and the token mask of a decode step.

    python bench/grammar.py [--model smollm2] [--quick] [--json]

Outputs of random JSON schemas are drawn token by token among what the masks allow. The time of a step counts: filling
the mask of each row, and taking the chosen tokens. The limit is writing the same bytes. xgrammar, driven the same way
on one thread, is the peer where it is installed (it brings its own way to torch).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
from random_schemas import Schema, random_schema
from report import Report, arguments

from diptych.checkpoints.source import ModelSource, open_model
from diptych.common.arrays import I32
from diptych.engine.schedule.sampling_builder import build_sampling
from diptych.engine.values.request import Request, new_request
from diptych.generation.grammar import Grammar
from diptych.generation.sampling_params import SamplingParams
from diptych.grammars.checker import Checker, Outcome, Verdict, Verdicts
from diptych.grammars.compiler import Compiler
from diptych.grammars.matcher import CompiledGrammar, GrammarMatcher
from diptych.grammars.source import check

BATCH_SIZES = (1, 16, 64)
NAMED: dict[str, Schema] = {
    "any object": {"type": "object"},
    "a person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "enum of 2,000": {"enum": [f"value {index}" for index in range(2000)]},
}


class Walk(Protocol):
    """One output under way."""

    def fill(self, mask: I32, row: int) -> None: ...

    def accept(self, token_id: int) -> bool:
        """Return False when the output has ended."""
        ...


class Library(Protocol):
    """What is measured."""

    def compile(self, schema: Schema) -> Callable[[], Walk]: ...


class Ours:
    """llguidance, as the engine uses it."""

    def __init__(self, source: ModelSource) -> None:
        self._compiler = Compiler(source.tokenizer(), source.config.vocab_size, source.config.eos_ids)

    def compile(self, schema: Schema) -> Callable[[], Walk]:
        compiled: CompiledGrammar = self._compiler.compile(Grammar.from_schema(schema))
        return lambda: OurWalk(compiled.matcher())


class OurWalk:
    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher

    def fill(self, mask: I32, row: int) -> None:
        self._matcher.fill_mask(mask, row)

    def accept(self, token_id: int) -> bool:
        self._matcher.accept((token_id,))
        assert self._matcher.error is None
        return not self._matcher.is_finished


class Xgrammar:
    """The peer, on one thread and without its cache."""

    def __init__(self, source: ModelSource) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(source.tokenizer().to_json())
            transformers: Any = importlib.import_module("transformers")
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        info = self._library.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=source.config.vocab_size, stop_token_ids=list(source.config.eos_ids)
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Schema) -> Callable[[], Walk]:
        compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False, max_whitespace_cnt=32)
        return lambda: XgrammarWalk(self._library.GrammarMatcher(compiled))


class XgrammarWalk:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: I32, row: int) -> None:
        import torch

        self._matcher.fill_next_token_bitmask(torch.from_numpy(mask), row)

    def accept(self, token_id: int) -> bool:
        assert self._matcher.accept_token(token_id)
        return not self._matcher.is_terminated()


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    source = open_model(options.model)
    sides: dict[str, Library] = {"ours": Ours(source)}
    if importlib.util.find_spec("xgrammar"):
        sides["xgrammar"] = Xgrammar(source)
    num_schemas, num_steps = (50, 50) if options.quick else (200, 200)
    random_ones = [random_schema(Random(seed)) for seed in range(num_schemas)]
    with Report(as_json=options.json) as report:
        bench_check(report, random_ones)
        for name, schemas in {**{name: [one] for name, one in NAMED.items()}, "random, mean": random_ones}.items():
            bench_compile(report, sides, name, schemas)
        for batch_size in BATCH_SIZES:
            mask = np.full((batch_size, -(-source.config.vocab_size // 32)), -1, dtype=np.int32)
            bench_steps(report, sides, "a person", [NAMED["a person"]], mask, num_steps)
            bench_steps(report, sides, "all differ", random_ones, mask, num_steps)
        bench_builder(report, source)


def bench_check(report: Report, schemas: Sequence[Schema]) -> None:
    """What a process of its own costs a check: the limit is the same check in this process."""
    checker = Checker()
    start_s = time.perf_counter()
    checker.start()
    report.row("grammar", "start of a checking process", (time.perf_counter() - start_s) * 1e3, "ms")
    grammars = [Grammar.from_schema(schema) for schema in schemas]
    beside, here = [], []
    for grammar in grammars:
        beside.append(check_us(partial(checked, checker, grammar)))
        here.append(check_us(partial(check, grammar)))
    mean, limit = float(np.mean(beside)), float(np.mean(here))
    report.row("grammar", "check of random, mean", mean, "us", limit, "in process", limit / mean)
    verdicts = Verdicts()
    for grammar in grammars:
        verdicts.add(grammar, Verdict(Outcome.PASSED), 0.0)
    known = [check_us(partial(verdicts.find, grammar, 0.0)) for grammar in grammars]
    report.row("grammar", "check of random, known", float(np.mean(known)), "us")
    rollup = Path(f"/proc/{checker.pid}/smaps_rollup")
    if rollup.exists():
        (pss,) = [line for line in rollup.read_text().splitlines() if line.startswith("Pss:")]
        report.row("grammar", "memory of a checking process", int(pss.split()[1]) / 1024, "MiB")
    checker.close()


def checked(checker: Checker, grammar: Grammar) -> None:
    checker.begin()
    assert checker.check(grammar).source


def check_us(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1e6


def bench_compile(report: Report, sides: dict[str, Library], name: str, schemas: Sequence[Schema]) -> None:
    times = {side: float(np.mean([compile_ms(library, one) for one in schemas])) for side, library in sides.items()}
    report.row("grammar", f"compile {name}", times.pop("ours"), "ms", peers=times)


def compile_ms(library: Library, schema: Schema) -> float:
    start_s = time.perf_counter()
    library.compile(schema)
    return (time.perf_counter() - start_s) * 1e3


def bench_steps(
    report: Report, sides: dict[str, Library], name: str, schemas: Sequence[Schema], mask: I32, steps: int
) -> None:
    """Measure µs a step for each side, and for writing as many bytes."""
    times = {side: float(np.median(step_us(library, schemas, mask, steps))) for side, library in sides.items()}
    limit = min(write_us(mask) for _ in range(100))
    value = times.pop("ours")
    report.row("grammar", f"step of {len(mask)}, {name}", value, "us", limit, "write", limit / value, times)


def step_us(library: Library, schemas: Sequence[Schema], mask: I32, steps: int) -> list[float]:
    rng = np.random.default_rng(0)
    starts = [library.compile(schema) for schema in schemas]
    walks = [starts[row % len(starts)]() for row in range(len(mask))]
    times, num_started = [], len(walks)
    for _ in range(steps):
        start_s = time.perf_counter()
        for row, walk in enumerate(walks):
            walk.fill(mask, row)
        filled_s = time.perf_counter()
        chosen = [draw(row, rng) for row in mask]
        drawn_s = time.perf_counter()
        alive = [walk.accept(token_id) for walk, token_id in zip(walks, chosen, strict=True)]
        times.append((filled_s - start_s + time.perf_counter() - drawn_s) * 1e6)
        for row in (row for row, is_alive in enumerate(alive) if not is_alive):
            walks[row] = starts[num_started % len(starts)]()
            num_started += 1
    return times


def draw(row: I32, rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))))


def write_us(mask: I32) -> float:
    start_s = time.perf_counter()
    mask.fill(-1)
    return (time.perf_counter() - start_s) * 1e6


def bench_builder(report: Report, source: ModelSource) -> None:
    """What 64 requests cost the step's sampling arrays: none, one or all of them constrained."""
    compiler = Compiler(source.tokenizer(), source.config.vocab_size, source.config.eos_ids)
    compiled = compiler.compile(Grammar.from_schema(NAMED["a person"]))
    plain = builder_us([], 64, source)
    report.row("grammar", "arrays of 64 rows, none constrained", plain, "us")
    for count in (1, 64):
        matchers = [compiled.matcher() for _ in range(count)]
        report.row(
            "grammar", f"arrays of 64 rows, {count} constrained", builder_us(matchers, 64, source), "us", plain, "none"
        )


def builder_us(matchers: Sequence[GrammarMatcher], batch_size: int, source: ModelSource) -> float:
    requests = [request_with(matchers[row] if row < len(matchers) else None) for row in range(batch_size)]
    eos_ids = frozenset(source.config.eos_ids)
    times = []
    for _ in range(300):
        start_s = time.perf_counter()
        build_sampling(requests, eos_ids, source.config.vocab_size)
        times.append((time.perf_counter() - start_s) * 1e6)
    return float(np.median(times))


def request_with(matcher: GrammarMatcher | None) -> Request:
    grammar = None if matcher is None else Grammar.from_schema({})
    request = new_request(1, np.array([1]), SamplingParams(grammar=grammar))
    request.matcher = matcher
    return request


if __name__ == "__main__":
    main()
