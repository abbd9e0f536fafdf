"""What it costs to guess how requests go on, and what guesses are worth, for each source of drafts.

    python bench/drafting.py [--model smollm2] [--quick] [--json]

No model runs. A text is known to its end, and what a source guesses is compared with it, as a step would: all tokens
whose chance is `MIN_CHANCE` or more are verified, and those that are right come with the one behind them. So tokens and
drafts a step and bytes are the same on every machine; times are not. The limit is what drafting may take: 30 us a
request a step. A request's first guess is shown by itself: it makes what is kept of the request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from report import Report, arguments

from diptych.checkpoints.source import open_model
from diptych.engine.drafting.ngram import NgramSource
from diptych.engine.drafting.predicted import PredictedSource
from diptych.engine.drafting.source import DraftSource
from diptych.engine.drafting.suffix import SuffixSource
from diptych.engine.values.request import Request, new_request
from diptych.generation.request_groups import Hints
from diptych.generation.sampling_params import SamplingParams
from diptych.tokens.packed_tokens import pack
from diptych.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
VOCAB = 49_152
AT_MOST = 15  # tokens of a guess
MIN_CHANCE = 0.3
LIMIT_US = 30.0
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy", "mallory", "niaj")
CITIES = ("Paris", "Rome", "Oslo", "Lima")


@dataclass(frozen=True)
class Case:
    """A request and how it goes on."""

    prompt: Sequence[int]
    output: Sequence[int]
    prediction: Sequence[int] = ()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer counts")
    options = parser.parse_args()
    tokenizer = open_model(options.model).tokenizer()
    num_cases = 4 if options.quick else 12
    kinds = {"code edit": code_edit, "JSON": json_records, "quotes": quotes, "prose": prose}
    with Report(as_json=options.json) as report:
        for kind, make in kinds.items():
            cases = [make(tokenizer, Random(number), number) for number in range(num_cases)]
            measure(report, f"{kind}, suffix", SuffixSource(), cases)
            measure(report, f"{kind}, ngram", NgramSource(), cases)
            if cases[0].prediction:
                measure(report, f"{kind}, predicted", PredictedSource(VOCAB), cases)
        measure_extremes(report)


def measure(report: Report, name: str, source: DraftSource, cases: Sequence[Case]) -> None:
    """One request after the other, so that later ones know the answers to those before."""
    times: list[float] = []
    num_tokens = num_drafts = num_accepted = 0
    held = 0.0  # bytes a token
    for room, case in enumerate(cases):
        request = started(room, case)
        for accepted, drafts, took_s in steps(source, request, case.output):
            num_drafts, num_accepted = num_drafts + drafts, num_accepted + accepted
            times.append(took_s)
        held = max(held, source.nbytes / (request.num_tokens + num_tokens))
        num_tokens += len(case.output)
        source.end(request)
    us = 1e6 * np.array(times)
    row_us(report, f"{name}: a guess, mean", float(us.mean()))
    row_us(report, f"{name}: a guess, median", float(np.median(us)))
    report.row("drafting", f"{name}: tokens a step", num_tokens / len(times), "tokens", 1.0, "no drafts")
    report.row("drafting", f"{name}: drafts a step", num_drafts / len(times), "tokens")
    report.row("drafting", f"{name}: came true", num_accepted / max(1, num_drafts), "of drafts")
    if held:
        report.row("drafting", f"{name}: held, at most", held, "B/token", 64.0, "B/token", 64.0 / held)


def steps(source: DraftSource, request: Request, output: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield how many drafts each step accepts, of how many, and the time to guess them."""
    at = 0
    while at < len(output):
        begun_s = time.thread_time()
        guess = source.guess(request, AT_MOST)
        took_s = time.thread_time() - begun_s
        drafts = [token for token, chance in zip(*guess, strict=True) if chance >= MIN_CHANCE]
        accepted = 0
        while accepted < len(drafts) and output[at + accepted : at + accepted + 1] == [drafts[accepted]]:
            accepted += 1
        for token in output[at : at + accepted + 1]:
            request.append(token)
        at += accepted + 1
        yield accepted, len(drafts), took_s


def measure_extremes(report: Report) -> None:
    """Texts for which an index or a search takes the longest, with nothing to learn from them."""
    rng = np.random.default_rng(0)
    texts = {
        "one token again and again": np.zeros(4000, np.int64),
        "tokens of two kinds by chance": rng.integers(0, 2, 4000),
        "tokens by chance": rng.integers(0, VOCAB, 4000),
        "a prompt of 100,000 tokens": np.minimum(rng.zipf(1.2, 100_000), VOCAB - 1),
    }
    sources: dict[str, Callable[[], DraftSource]] = {"suffix": SuffixSource, "ngram": NgramSource}
    for text, tokens in texts.items():
        for name, new_source in sources.items():
            case = Case(tokens.tolist(), tokens[:600].tolist())
            source, request = new_source(), started(1, case)
            first, *later = [took_s for _, _, took_s in steps(source, request, case.output)]
            row_us(report, f"{text}, {name}: the first guess", 1e6 * first)
            if later:
                row_us(report, f"{text}, {name}: later ones, mean", 1e6 * float(np.mean(later)))
            if name == "suffix":
                begun_s = time.thread_time()
                source.end(request)
                row_us(report, f"{text}, {name}: its end", 1e6 * (time.thread_time() - begun_s))


def started(room: int, case: Case) -> Request:
    params = SamplingParams(max_tokens=len(case.output))
    hints = Hints(prediction=pack(case.prediction))
    return new_request(room, np.array(case.prompt, np.int64), params, hints=hints)


def row_us(report: Report, name: str, took_us: float) -> None:
    report.row("drafting", name, took_us, "us", LIMIT_US, "us", LIMIT_US / took_us)


# texts


def code_edit(tokenizer: Tokenizer, rng: Random, number: int) -> Case:
    """A file of ours, of which a name, some lines and some numbers change."""
    old = file_text("services/diptych/engine/schedule/*.py", number)
    words = sorted({word for word in old.replace("(", " ").split() if word.isidentifier() and len(word) > 5})
    new = old.replace(rng.choice(words), "renamed_by_an_edit")
    lines = new.splitlines(keepends=True)
    for _ in range(max(1, len(lines) // 40)):
        at = rng.randrange(len(lines))
        lines[at : at + rng.randrange(3)] = [
            f"    edited_{rng.randrange(1000)} = {rng.choice(words)}\n"
        ] * rng.randrange(3)
    prediction = tokenizer.encode(old)
    prompt = tokenizer.encode(f"Change this file.\n{old}\nThe new file:\n")
    return Case(prompt, tokenizer.encode("".join(lines)), prediction)


def json_records(tokenizer: Tokenizer, rng: Random, number: int) -> Case:
    records = [
        {
            "id": rng.randrange(10_000),
            "name": rng.choice(NAMES),
            "email": f"{rng.choice(NAMES)}@example.com",
            "is_active": rng.random() < 0.5,
            "address": {"street": f"{rng.randrange(200)} Main Street", "city": rng.choice(CITIES)},
        }
        for _ in range(16)
    ]
    prompt = tokenizer.encode("List the users as JSON with id, name, email, is_active and address.")
    return Case(prompt, tokenizer.encode(json.dumps(records, indent=2)))


def quotes(tokenizer: Tokenizer, rng: Random, number: int) -> Case:
    text = file_text("docs/concepts/*.md", number)
    sentences = [each for each in text.replace("\n", " ").split(". ") if 40 < len(each) < 300]
    openings = ("The text says: ", "It is written that ", "As for this, one reads: ", "A further point is ")
    quoted = "\n".join(f'{rng.choice(openings)}"{each}."' for each in rng.sample(sentences, min(8, len(sentences))))
    return Case(tokenizer.encode(f"Summarise this with quotes.\n{text}"), tokenizer.encode(quoted))


def prose(tokenizer: Tokenizer, rng: Random, number: int) -> Case:
    return Case(tokenizer.encode("Write about it."), tokenizer.encode(file_text("docs/concepts/*.md", number)))


def file_text(pattern: str, number: int) -> str:
    """Return the beginning of another file for each number, as far as there are files."""
    files = [text for path in sorted(ROOT.glob(pattern)) if len(text := path.read_text()) > 2000]
    return files[number % len(files)][:8000]


if __name__ == "__main__":
    main()
