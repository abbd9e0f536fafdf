"""What choosing tokens costs a step, against transformers' processors and against reading the logits once.

    python bench/sampling.py [--threads N] [--vocab N] [--batch 1 16 64] [--quick] [--json]

Both sides get the same float32 logits, as peaked as a language model's. transformers' side is its processors and
warpers in their usual order, softmax and `multinomial`; penalties are over the same tokens. Our time has what the
scheduler prepares for a step in it, which is shown apart too. The limit is one read of the logits at the memory
bandwidth measured in the same run; a small batch is in the cache, and may be read faster than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from report import Report, arguments
from torch import Tensor
from transformers.generation import logits_process as theirs

from diptych.engine.runner.sampling.cpu_sampler import CpuSampler
from diptych.engine.runner.sampling.sampler import sample_step
from diptych.engine.schedule.sampling_builder import build_sampling
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams
from diptych.kernels.cpu import library

CONTEXT = 512  # tokens that penalties have seen
READ_FLOATS = 1 << 26  # 256 MiB: far beyond any cache
EOS_IDS = frozenset({2})
SAMPLER = CpuSampler()

Processors = Sequence[Callable[[Any, Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to sample: our parameters, and transformers' processors for it."""

    name: str
    params: dict[str, Any]
    processors: Processors = field(default=())

    @property
    def is_greedy(self) -> bool:
        return bool(self.params.get("temperature") == 0.0)


CASES = (
    Case("greedy", {"temperature": 0.0}),
    Case("temperature", {"temperature": 0.8}, [theirs.TemperatureLogitsWarper(0.8)]),
    Case("top-p", {"top_p": 0.95}, [theirs.TopPLogitsWarper(0.95)]),
    Case("top-k", {"top_k": 50}, [theirs.TopKLogitsWarper(50)]),
    Case("top-k + top-p", {"top_k": 50, "top_p": 0.9}, [theirs.TopKLogitsWarper(50), theirs.TopPLogitsWarper(0.9)]),
    Case("min-p", {"min_p": 0.05}, [theirs.MinPLogitsWarper(0.05)]),
    Case(
        "penalties",
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        [theirs.RepetitionPenaltyLogitsProcessor(1.2)],
    ),
    Case("logprobs", {"temperature": 0.0, "logprobs": 5}),
)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    parser.add_argument("--vocab", type=int, default=49152, help="tokens in the vocabulary")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="batch sizes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library.set_num_threads(options.threads)
    memory = torch.ones(READ_FLOATS)
    float_read_s = fastest(10, memory.sum)[0] / READ_FLOATS
    with Report(as_json=options.json) as report, torch.inference_mode():
        for batch_size in options.batch:
            for case in CASES:
                bench(report, case, batch_size, options.vocab, float_read_s, 3 if options.quick else 9)


def bench(report: Report, case: Case, batch_size: int, vocab_size: int, float_read_s: float, rounds: int) -> None:
    """Measure one case; the best round of each side counts. Ours are many: they are short, and machines are shared."""
    logits = peaked_logits(batch_size, vocab_size)
    requests = [new_running(case, row, vocab_size) for row in range(batch_size)]
    tokens = torch.from_numpy(np.stack([request.tokens[: request.num_tokens] for request in requests]))
    (peer,) = fastest(rounds, lambda: their_step(case, tokens, logits))
    ours, copy, build = fastest(
        10 * rounds,
        lambda: sample_step(SAMPLER, logits.clone(), build_sampling(requests, EOS_IDS, vocab_size), None),
        logits.clone,
        lambda: build_sampling(requests, EOS_IDS, vocab_size),
    )
    ours -= copy  # the engine's logits may be overwritten
    limit = float_read_s * logits.numel()
    name = f"{case.name}, batch {batch_size}"
    times = {"transformers": 1e6 * peer, "of ours, the scheduler's": 1e6 * build}
    report.row("sampling", name, 1e6 * ours, "us", 1e6 * limit, "one read of the logits", limit / ours, times)


def peaked_logits(batch_size: int, vocab_size: int) -> Tensor:
    """Half of the probability is on a few tokens, the rest has a long tail."""
    generator = torch.Generator().manual_seed(batch_size)
    logits = 2.0 * torch.randn(batch_size, vocab_size, generator=generator)
    best = torch.randint(vocab_size, (batch_size, 8), generator=generator)
    return logits.scatter_add_(1, best, torch.linspace(12, 6, 8).expand(batch_size, -1))


def new_running(case: Case, row: int, vocab_size: int) -> Request:
    """A request in the middle of its output."""
    params = SamplingParams(max_tokens=2 * CONTEXT, seed=row, **case.params)
    generator = np.random.default_rng(row)
    request = new_request(row + 1, generator.integers(0, vocab_size, CONTEXT // 2), params)
    for token_id in generator.integers(0, vocab_size, CONTEXT // 2).tolist():
        request.append(token_id)
    return request


def their_step(case: Case, tokens: Tensor, logits: Tensor) -> Tensor:
    """What transformers' generate does with the logits of a step."""
    scores = logits.to(copy=True, dtype=torch.float32)
    for process in case.processors:
        scores = process(tokens, scores)
    if "logprobs" in case.params:
        scores.log_softmax(-1).topk(case.params["logprobs"])
    if case.is_greedy:
        return scores.argmax(-1)
    return torch.multinomial(scores.softmax(-1), 1)[:, 0]


def fastest(rounds: int, *sides: Callable[[], Any]) -> list[float]:
    """Return the best time of each side in seconds; they take turns."""
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for index, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
