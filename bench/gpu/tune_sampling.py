"""Tokens from logits on the GPU: ours, torch's sort and flashinfer's kernels, against one read of the logits.

Rows are like a language model's, some peaked and some wide, or flat, which is the worst case of ours. Ours and torch's
are timed in graphs; flashinfer's are launched one by one, so the host's launches are in them. Logits that fit into the
L2 cache are read from there, as those that the language model head has just written are. Sweeps launches, too, and
names the fastest for 1 and 64 rows together; `--quick` leaves that out. Flashinfer comes last: it may compile its
kernels first, for minutes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from device_clock import seconds_each, seconds_eager
from report import Report, arguments
from roofline import roofline
from torch import Tensor

from diptych.kernels.gpu.sampling.logprobs import logprobs
from diptych.kernels.gpu.sampling.sampling import Launch, greedy, sample, sampling_workspace

VOCABULARY: Final = 128_256
BATCHES: Final = (1, 16, 64, 256)
TUNED: Final = (1, 64)
NUM_TOP: Final = 5
SHOWN: Final = 3

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """How every row of a batch is sampled."""

    name: str
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    is_flat: bool = False


CASES: Final = (
    Case("all tokens"),
    Case("top-p 0.95", top_p=0.95),
    Case("top-k 50", top_k=50),
    Case("top-k 20, top-p 0.95", top_k=20, top_p=0.95),
    Case("min-p 0.05", min_p=0.05),
    Case("flat rows, top-p 0.95", top_p=0.95, is_flat=True),
)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.manual_seed(0)
    copied = roofline().copy_bytes_s
    with Report(as_json=options.json) as report:
        for batch_size in BATCHES:
            logits = wide_and_peaked_rows(batch_size)
            _bench_others(report, logits, copied)
            for case in CASES:
                _bench(report, case, flat_rows(batch_size) if case.is_flat else logits, copied)
    with Report(as_json=options.json) as report:
        if not options.quick:
            _sweep(report, copied)
    with Report(as_json=options.json) as report:
        _bench_flashinfer(report, copied)


def wide_and_peaked_rows(batch_size: int) -> Tensor:
    """Probability falls with a power of the rank, of 1.2 to 3: from hundreds of likely tokens to very few."""
    ranks = torch.rand(batch_size, VOCABULARY, device="cuda").argsort(dim=-1)
    power = torch.linspace(1.2, 3, batch_size, device="cuda")[torch.randperm(batch_size, device="cuda")]
    return (20 - power[:, None] * (ranks + 1).log()).bfloat16()


def flat_rows(batch_size: int) -> Tensor:
    return (0.5 * torch.randn(batch_size, VOCABULARY, device="cuda")).bfloat16()


def _bench(report: Report, case: Case, logits: Tensor, copied: float) -> None:
    peers = {"torch": 1e6 * seconds_each([partial(torch_sample, logits, case)])}
    _row(report, f"{case.name}, batch {len(logits)}", seconds_each([our_run(logits, case)]), logits, copied, peers)


def _bench_flashinfer(report: Report, copied: float) -> None:
    for batch_size, case in itertools.product(TUNED, CASES):
        logits = flat_rows(batch_size) if case.is_flat else wide_and_peaked_rows(batch_size)
        try:
            took_s = seconds_eager(flashinfer_run(logits, case))
        except Exception as error:  # not installed, or another version's names
            print(f"no flashinfer, {case.name}: {error!r}", file=sys.stderr)
            return
        peers = {"ours": 1e6 * seconds_each([our_run(logits, case)])}
        _row(report, f"flashinfer, {case.name}, batch {batch_size}", took_s, logits, copied, peers)


def _bench_others(report: Report, logits: Tensor, copied: float) -> None:
    """What draws nothing."""
    num_rows = len(logits)
    workspace = sampling_workspace(num_rows, VOCABULARY, logits.device)
    tokens = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    seconds = seconds_each([lambda: greedy(logits, tokens, workspace)])
    peers = {"torch.argmax": 1e6 * seconds_each([lambda: logits.argmax(dim=-1)])}
    _row(report, f"greedy, batch {num_rows}", seconds, logits, copied, peers)
    top_ids = torch.zeros(num_rows, NUM_TOP, dtype=torch.int64, device="cuda")
    own, top = torch.zeros(num_rows, device="cuda"), torch.zeros(num_rows, NUM_TOP, device="cuda")
    seconds = seconds_each([lambda: logprobs(logits, tokens, own, top_ids, top, workspace)])
    peers = {"torch": 1e6 * seconds_each([lambda: logits.float().log_softmax(dim=-1).topk(NUM_TOP)])}
    _row(report, f"logprobs and {NUM_TOP} likeliest, batch {num_rows}", seconds, logits, copied, peers)


def our_run(logits: Tensor, case: Case, launch: Launch | None = None) -> Run:
    num_rows = len(logits)
    workspace = sampling_workspace(num_rows, VOCABULARY, logits.device)
    values = (0.8, case.top_k, case.top_p, case.min_p)
    heat, top_k, top_p, min_p = (torch.full((num_rows,), x, dtype=torch.float64, device="cuda") for x in values)
    uniforms = torch.rand(num_rows, dtype=torch.float64, device="cuda")
    tokens = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    return lambda: sample(logits, heat, top_k, top_p, min_p, uniforms, tokens, workspace, launch or Launch())


def torch_sample(logits: Tensor, case: Case) -> Tensor:
    """Sort, cut and draw, as most samplers in torch do; no more of that than the case needs."""
    probabilities = (logits.float() / 0.8).softmax(dim=-1)
    if case.min_p:
        least = case.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    if not case.top_k and case.top_p == 1:
        return _drawn(probabilities)
    ordered, ids = probabilities.topk(case.top_k) if case.top_k else probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= case.top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
    return ids.gather(1, _drawn(kept))


def _drawn(weights: Tensor) -> Tensor:
    """The same as `multinomial`, which waits for the device."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1, keepdim=True)


def flashinfer_run(logits: Tensor, case: Case) -> Run:
    from flashinfer import sampling  # type: ignore[import-not-found, unused-ignore]

    kernels: Any = sampling

    def run() -> object:
        probabilities = (logits.float() / 0.8).softmax(dim=-1)
        if case.top_k and case.top_p < 1:
            return kernels.top_k_top_p_sampling_from_probs(probabilities, case.top_k, case.top_p)
        if case.top_k:
            return kernels.top_k_sampling_from_probs(probabilities, case.top_k)
        if case.top_p < 1:
            return kernels.top_p_sampling_from_probs(probabilities, case.top_p)
        if case.min_p:
            return kernels.min_p_sampling_from_probs(probabilities, case.min_p)
        return kernels.sampling_from_probs(probabilities)

    return run


def _sweep(report: Report, copied: float) -> None:
    case, rows = CASES[3], [wide_and_peaked_rows(batch_size) for batch_size in TUNED]
    launches = [Launch(*numbers) for numbers in itertools.product((16, 32, 64), (4, 8), (8, 16))]
    seconds = {each: [seconds_each([our_run(logits, case, each)]) for logits in rows] for each in launches}
    for launch in sorted(launches, key=lambda each: sum(seconds[each]))[:SHOWN]:
        name = f"tile {launch.tile_blocks} blocks, warps {launch.scan_warps}, {launch.draw_warps}"
        for logits, spent in zip(rows, seconds[launch], strict=True):
            _row(report, f"{case.name}, batch {len(logits)}, {name}", spent, logits, copied, {})


def _row(report: Report, case: str, seconds: float, logits: Tensor, copied: float, peers: Mapping[str, float]) -> None:
    limit = logits.nbytes / copied
    limit_is = "one read at the speed of a copy"
    report.row("gpu/sampling", case, 1e6 * seconds, "us", 1e6 * limit, limit_is, limit / seconds, peers)


if __name__ == "__main__":
    main()
