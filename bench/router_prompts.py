"""What long prompts cost the router: requests/s, CPU time, RSS. Prompts of 220 KB, 10 streamed tokens.

A real router and a real bootstrap; two prefill and two decode workers are simulated and take no time (`router_rig`).

fresh   text that nobody has seen before: as fast as the tokenizer is, alone on this machine, in as many threads
turns   conversations that go on: all but the last message has been seen before, so its tokens are known
text    fresh text with `--tokenize-at worker`: the router makes no tokens of it

Peers were measured on a machine like this one, with bodies as long, prefill and decode apart and cache-aware routing;
but for Dynamo's they do not tokenise. See `results/cpu.md`.

    python bench/router_prompts.py [--quick] [--json] [--workers N] [--only WORD]
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import report
from router_rig.load import NUMBER
from router_rig.long_context import write_model
from router_rig.platform import Cast, Platform, platform

from diptych.checkpoints.source import open_model
from diptych.tokens.prompt_encoder import PromptEncoder
from diptych.tokens.tokenizer import stay_in_the_callers_thread

BENCH: Final = "router_prompts"
PROMPT_CHARS: Final = 220_000
MESSAGE_CHARS: Final = 5_500  # of a conversation
NUM_TEXTS: Final = 16
NUM_TOKENS: Final = 10
THREADS: Final = 2  # of the router
DOCS: Final = Path(__file__).parents[1] / "docs"
MIB: Final = 2**20
MAX_RSS_MIB: Final = 400.0

PEERS: Final[Mapping[int, Mapping[str, float]]] = {  # requests/s, by concurrency
    32: {"smg": 640, "sglang-router": 570, "vllm-router": 60, "dynamo": 15, "mini-lb": 130, "litellm": 11},
    150: {"smg": 700, "sglang-router": 1040, "vllm-router": 90, "dynamo": 17, "mini-lb": 130, "litellm": 8},
}
CPU_PEERS: Final = {"smg": 3.2, "sglang-router": 1.9, "mini-lb": 8.5, "dynamo": 115.0}  # ms a request

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, of which router."""

    name: str
    tokenize_at: str
    concurrencies: Sequence[int]
    is_conversation: bool = False
    is_tokenized: bool = False  # by the router, all of it

    def bodies(self, texts: Sequence[str]) -> list[Mapping[str, Any]]:
        return [{"messages": _turns(text) if self.is_conversation else _question(text), **_OPTIONS} for text in texts]


_OPTIONS: Final = {"max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
CASES: Final = (
    Case("fresh", "router", (32,), is_tokenized=True),
    Case("turns", "router", (32, 150), is_conversation=True),
    Case("text", "worker", (32, 150)),
)


def english(rng: random.Random) -> str:
    """Return paragraphs of this project's pages in any order."""
    paragraphs = [part for page in sorted(DOCS.rglob("*.md")) for part in page.read_text().split("\n\n")]
    text = ""
    while len(text) < PROMPT_CHARS:
        rng.shuffle(paragraphs)
        text += "\n\n".join(paragraphs)
    return text.replace("<", "(")[:PROMPT_CHARS]  # a special token in it would be a cut


def _question(text: str) -> list[Message]:
    return [{"role": "user", "content": f"{NUMBER} {text}"}]


def _turns(text: str) -> list[Message]:
    parts = [text[start : start + MESSAGE_CHARS] for start in range(0, len(text), MESSAGE_CHARS)]
    turns = [{"role": ("user", "assistant")[index % 2], "content": part} for index, part in enumerate(parts)]
    return [*turns, {"role": "user", "content": f"And what of number {NUMBER}?"}]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast prompts were."""

    rate: float  # prompts/s
    cpu_s: float  # a prompt


def tokenizer_alone(model: Path, texts: Sequence[str], seconds: float) -> Pace:
    """Do nothing but to make tokens of the texts, in as many threads as the router."""
    encoder, end_s = PromptEncoder(open_model(str(model), "dummy").tokenizer(), cache_bytes=0), 0.0

    def encode(start: int) -> int:
        count = start
        while time.perf_counter() < end_s:
            encoder.encode(f"{count} {texts[count % len(texts)]}")
            count += 1
        return count - start

    encoder.encode(texts[0])
    with ThreadPoolExecutor(THREADS) as threads:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        end_s = began_s + seconds
        count = sum(threads.map(encode, range(0, THREADS * 8, 8)))
        return Pace(count / (time.perf_counter() - began_s), (time.process_time() - began_cpu_s) / count)


def measure(running: Platform, case: Case, concurrency: int, texts: Sequence[str], seconds: float) -> Pace:
    tally = running.load(case.bodies(texts), concurrency, seconds, warm_up_s=2.0)
    if tally.failures or not tally.requests:
        raise SystemExit(f"{case.name}: {tally.failures} of {tally.requests} failed: {tally.first_failure!r}")
    return Pace(tally.requests / tally.seconds, tally.cpu_s / tally.requests)


def compare(case: Case, concurrency: int, pace: Pace, alone: Pace, out: report.Report) -> None:
    name, words = f"{case.name}/{concurrency}", f"{THREADS} threads that only tokenise"
    if case.is_tokenized:
        out.row(BENCH, name, pace.rate, "requests/s", alone.rate, words, pace.rate / alone.rate, PEERS[concurrency])
        cpu_s, limit_s = pace.cpu_s, alone.cpu_s
        out.row(BENCH, f"  CPU, {name}", 1e3 * cpu_s, "ms/request", 1e3 * limit_s, words, limit_s / cpu_s)
    else:
        out.row(BENCH, name, pace.rate, "requests/s", peers=PEERS[concurrency])
        out.row(BENCH, f"  CPU, {name}", 1e3 * pace.cpu_s, "ms/request", peers=CPU_PEERS)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="a case")
    parser.add_argument("--workers", type=int, default=1, help="processes of the router")
    parser.add_argument("--only", default="", help="cases with this word in their name")
    options = parser.parse_args()
    seconds = 2.5 if options.quick else options.seconds
    texts = [english(random.Random(number)) for number in range(NUM_TEXTS)]
    stay_in_the_callers_thread()
    with report.Report(as_json=options.json) as out, tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        alone = tokenizer_alone(model, texts, seconds)
        for case in CASES:
            if options.only not in case.name:
                continue
            flags = {"load-format": "dummy", "tokenizer-threads": THREADS, "tokenize-at": case.tokenize_at}
            if options.workers > 1:
                flags["workers"] = options.workers
            with platform(Cast(model=str(model), load_format="dummy", router_options=flags)) as running:
                if case.is_conversation:  # its earlier turns have been there
                    running.load(case.bodies(texts), NUM_TEXTS, 60.0, warm_up_s=0.0, max_requests=NUM_TEXTS)
                for concurrency in case.concurrencies:
                    compare(case, concurrency, measure(running, case, concurrency, texts, seconds), alone, out)
                out.row(BENCH, f"  RSS after {case.name}", running.rss_bytes() / MIB, "MiB", MAX_RSS_MIB, "wanted")


if __name__ == "__main__":
    main()
