"""Schedulers that share experts (`--dp-attention`) on two GPUs, beside the other ways to have a model on two.

*exchange*: rows to experts and back, as a layer does it, with experts that compute nothing, for 64 rows and 4,096,
7,168 wide, 8 of 256 experts: by kernels that store to peers' memory, launched and replayed from a graph, and by NCCL
(pack, NCCL, unpack, NCCL, add up); a time is the median of what a call takes on the slower rank, its limit two NCCL
all-to-alls of as many bytes as a padded round sends. On stderr: what a call queues on the device, and how often it
waits.
*engine*: 128 requests of 32 tokens in and 128 out, greedy, at once, on a DeepSeek-V2-Lite-like shape with made-up
weights: `--dp 2 --dp-attention`, with `--peer-exchange off` too, `--tp 2`, `--tp 2 --expert-parallel`, one GPU;
output tokens a second, each in an engine of its own, one after the other, the second of two bursts; a third is
compared. *same tokens*: the share of requests whose tokens are those of one GPU. *widest margin*: where tokens first
differ, how much likelier one GPU took its own to be, at most: sums in another order turn what is nearly a tie, and
nothing else.
*overlap* (with `--only overlap` alone): what halves of steps that take turns gain, or cost. First layers by themselves
(`bench/overlapped_layers.py`), then engines of the shape above, by NCCL, with `--overlap-batches` and without: 128
requests of 32 tokens in and 32 out, and 64 of 1,024 in and one out, tokens a second of the second of two bursts.

    PYTHONPATH=bench python bench/gpu/shared_experts.py [--only exchange|engine|overlap] [--quick] [--json]
    ... --only engine --device cpu --quick      # a tiny shape: shows that it works, on any machine

Needs two GPUs. Exchange takes about 20 s, each engine about 15 s; of overlap an engine takes about 35 s.
"""

from __future__ import annotations

import json
import operator
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import overlapped_layers
import torch
from llama_8b import model_folder
from rank_processes import output_of_ranks
from report import Report, arguments
from torch import Tensor
from torch._C._autograd import DeviceType

from diptych.engine import Engine, EngineOptions, Generation, SamplingParams
from diptych.engine.models.layers.spread_experts import PADDED_ROWS, ByPeers, Places, SpreadExperts
from diptych.engine.models.ranks import ALONE
from diptych.engine.options.shared_experts import SharedExperts
from diptych.engine.tensor_parallel.sharing.expert_group import ExpertGroup
from diptych.engine.values.rounds import Part, Round

BENCH: Final = "gpu/shared_experts"
NUM_RANKS: Final = 2
WIDTH: Final = 7168
NUM_EXPERTS: Final = 256
CHOICES: Final = 8
ROWS: Final = (64, 4096)
WARM: Final = 20
CALLS: Final = 100
TIMEOUT_S: Final = 60
PROFILED: Final = 10  # calls
LARGEST: Final = 6  # kernels that are named
LIKELIEST: Final = 5  # tokens whose logarithms of probabilities are asked for
TIE: Final = 1e-9  # nats: no less
WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SHAPE: Final[Mapping[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
TINY: Final = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3} | {
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SIDES: Final[Mapping[str, Mapping[str, Any]]] = {
    "dp 2, dp-attention": {"dp": 2, "dp_attention": True},
    "dp 2, dp-attention, by NCCL": {"dp": 2, "dp_attention": True, "peer_exchange": "off"},
    "tp 2": {"tp": 2},
    "tp 2, expert-parallel": {"tp": 2, "expert_parallel": True},
    "one GPU": {},
}
SHARED: Final = "dp 2, dp-attention"
LEAST_TOKENS: Final = 16  # of a step that has halves


class NoWork:
    """Implements `Experts`: the exchange alone is timed."""

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor, out: Tensor) -> None:
        out.zero_()


def timed(work: Any, device: torch.device) -> float:
    """Return the median of calls, microseconds, each waited for: the counted form has the host wait anyway."""
    times = []
    for turn in range(WARM + CALLS):
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        if turn >= WARM:
            times.append(time.perf_counter() - began_s)
    return statistics.median(times) * 1e6


def profiled(work: Any) -> str:
    """Return how many kernels and copies a call queues, what they take, and those that take most; microseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            work()
        torch.cuda.synchronize()
    events = profile.key_averages()
    on_device = [each for each in events if each.device_type == DeviceType.CUDA]
    waits = sum(each.count for each in events if each.key in WAITS) / PROFILED
    number = sum(each.count for each in on_device) / PROFILED
    took = sum(each.self_device_time_total for each in on_device) / PROFILED
    largest = sorted(on_device, key=lambda each: -each.self_device_time_total)[:LARGEST]
    words = [f"{each.key[:48]} {each.self_device_time_total / PROFILED:.1f}" for each in largest]
    return f"{number:g} queued, {took:.0f} us of the device, {waits:g} waits: {'; '.join(words)}"


def recorded(work: Any, device: torch.device) -> Any:
    """Return what replays `work`."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay


def be_rank(rank: int, folder: str) -> None:
    """Measure as one of two; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = ExpertGroup(
        SharedExperts(folder, rank, NUM_RANKS), 0, 1, device, torch.bfloat16, 0, counts=False, opens_memory=True
    )
    places, room = Places.of(group.placement(0, NUM_EXPERTS), rank, device), group.room(NUM_EXPERTS)
    exchange = group.peers(WIDTH, CHOICES, room)
    if exchange is None:
        raise SystemExit("the GPUs can't open each other's memory")
    by_nccl = SpreadExperts(NoWork(), places, group, ALONE, 0, is_last=False)
    by_peers = replace(by_nccl, by_peers=ByPeers(exchange, places.table(room)))
    generator = torch.Generator().manual_seed(rank)
    for num_rows in ROWS:
        x = torch.randn(num_rows, WIDTH, generator=generator).to(device, torch.bfloat16)
        chosen = torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(CHOICES).indices.to(device)
        shares, out = torch.rand(num_rows, CHOICES, generator=generator).to(device, x.dtype), torch.empty_like(x)
        group.begin(Round((Part(num_rows, 0),) * NUM_RANKS))
        everything = torch.empty(NUM_RANKS * num_rows, WIDTH, dtype=x.dtype, device=device)
        equal = [num_rows] * NUM_RANKS

        def both_ways(everything: Tensor = everything, equal: Sequence[int] = equal) -> None:
            group.exchange(group.exchange(everything, equal, equal)(), equal, equal)()

        launched = partial(by_peers.forward, x, chosen, shares, out)
        works = launched, recorded(launched, device), partial(by_nccl.forward, x, chosen, shares, out), both_ways
        slower = torch.tensor([[timed(work, device) for work in works]], device=device)
        slower = group.all_gather(slower)().amax(0)
        words = [profiled(work) for work in (works[0], works[2])]
        if rank == 0:
            print(json.dumps([num_rows, slower.tolist(), words]), flush=True)


def measure_exchange(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        output = output_of_ranks([__file__, "--folder", folder], NUM_RANKS, TIMEOUT_S)
    for num_rows, (launched, replayed, by_nccl, limit), words in map(json.loads, output.splitlines()):
        case = f"there and back/{num_rows} rows"
        form = "padded" if num_rows <= PADDED_ROWS else "counted"
        for name, took in (("by peers", launched), ("by peers, recorded", replayed), (f"by NCCL, {form}", by_nccl)):
            report.row(BENCH, f"{case}, {name}", took, "us", limit, "two all-to-alls", limit / took)
        for name, queued in zip(("peers", "NCCL"), words, strict=True):
            print(f"{num_rows} rows by {name}: {queued}", file=sys.stderr)


def burst(
    engine: Engine, num_ids: int, count: int, seed: int, num_out: int, logprobs: int | None = None
) -> tuple[float, Sequence[Generation]]:
    """Return output tokens a second, and the answers."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(2, num_ids), k=32) for _ in range(count)]
    params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    began_s = time.perf_counter()
    answers = engine.generate_batch(prompts, params)
    return count * num_out / (time.perf_counter() - began_s), answers


def measure_engines(report: Report, device: str, *, quick: bool) -> None:
    shape = dict(SHAPE) | (TINY if device == "cpu" else {})
    count, num_out = (16, 16) if quick else (128, 128)
    found: dict[str, tuple[float, Sequence[Generation]]] = {}
    with model_folder(shape) as folder:
        for name, options in SIDES.items():
            asked: Any = {"device": device, "kv_events": "off", **options}
            with Engine(str(folder), EngineOptions(load_format="dummy", **asked), dispatch="round_robin") as engine:
                burst(engine, shape["vocab_size"], count, 1, num_out)
                speed, _ = burst(engine, shape["vocab_size"], count, 2, num_out)
                found[name] = speed, burst(engine, shape["vocab_size"], count, 3, num_out, LIKELIEST)[1]
    speeds = {name: speed for name, (speed, _) in found.items()}
    own, beside = speeds.pop(SHARED), speeds.pop("tp 2")
    report.row(BENCH, SHARED, own, "tokens/s", beside, "tp 2", own / beside, speeds)
    gaps = {name: first_gaps(answers, found["one GPU"][1]) for name, (_, answers) in found.items() if name != "one GPU"}
    same = {name: each.count(0.0) / count for name, each in gaps.items()}
    report.row(BENCH, "same tokens as one GPU", same.pop(SHARED), "of 1", peers=same)
    widest = {name: max(each) for name, each in gaps.items()}
    report.row(BENCH, "widest margin that was turned", widest.pop(SHARED), "nats", peers=widest)


def measure_overlap(report: Report, device: str, *, quick: bool) -> None:
    shape = dict(SHAPE) | (TINY if device == "cpu" else {})
    loads = {
        "output": ((16, 32, 8) if quick else (128, 32, 32), 1),
        "prompts": ((8, 256, 1) if quick else (64, 1024, 1), 256 if quick else 1024),
    }
    found: dict[str, dict[str, tuple[float, list[Sequence[int]]]]] = {}
    with model_folder(shape) as folder:
        for name, least_tokens in (("whole", 0), ("halves", LEAST_TOKENS)):
            asked: Any = {"device": device, "kv_events": "off", "dp": 2, "dp_attention": True, "peer_exchange": "off"}
            options = EngineOptions(load_format="dummy", overlap_batches=least_tokens, **asked)
            with Engine(str(folder), options, dispatch="round_robin") as engine:
                found[name] = {
                    load: timed_burst(engine, shape["vocab_size"], *sizes, counted)
                    for load, (sizes, counted) in loads.items()
                }
    for load in loads:
        (whole, expected), (halves, tokens) = found["whole"][load], found["halves"][load]
        report.row(BENCH, f"{load}, halves that take turns", halves, "tokens/s", whole, "whole", halves / whole)
        same = sum(map(operator.eq, tokens, expected)) / len(tokens)
        report.row(BENCH, f"{load}, same tokens as whole", same, "of 1")


def timed_burst(
    engine: Engine, num_ids: int, count: int, num_in: int, num_out: int, counted: int
) -> tuple[float, list[Sequence[int]]]:
    """Return tokens a second, and the outputs. `counted` tokens of a request for each that is put out."""
    params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)
    for seed in (1, 2):
        rng = random.Random(seed)
        prompts = [rng.choices(range(2, num_ids), k=num_in) for _ in range(count)]
        began_s = time.perf_counter()
        answers = engine.generate_batch(prompts, params)
    speed = count * num_out * counted / (time.perf_counter() - began_s)
    return speed, [each.token_ids for each in answers]


def first_gaps(found: Sequence[Generation], expected: Sequence[Generation]) -> list[float]:
    """Return of each answer how much less likely its first other token was to who gave the expected one; 0: none is.

    A token that is not among the likeliest counts as the least likely of these.
    """
    gaps = []
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            gaps.append(0.0)
            continue
        assert theirs.logprobs is not None
        top = slice(place * LIKELIEST, (place + 1) * LIKELIEST)
        likely = dict(zip(theirs.logprobs.top_ids[top], theirs.logprobs.top_logprobs[top], strict=True))
        other = likely.get(ours.token_ids[place], min(likely.values()))
        gaps.append(max(theirs.logprobs.logprobs[place] - other, TIE))
    return gaps


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("exchange", "engine", "overlap"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rank", type=int, help="be this rank of two that meet in --folder")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.rank is not None:
        with torch.inference_mode():
            be_rank(options.rank, options.folder)
        return
    with Report(as_json=options.json) as report:
        if options.only == "overlap":
            if options.device == "cuda":
                overlapped_layers.measure(report, BENCH, on_gpus=True, delay_ms=0.0)
            measure_overlap(report, options.device, quick=options.quick)
            return
        if options.only != "engine":
            measure_exchange(report)
        if options.only != "exchange":
            measure_engines(report, options.device, quick=options.quick)


if __name__ == "__main__":
    main()
