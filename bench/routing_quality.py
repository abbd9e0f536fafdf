"""How well routing policies place requests: a trace replayed on simulated workers by the real policies and index.

No model, no socket, no clock: a run gives the same numbers everywhere. Five parts:

- *closed*: eight workers that serve alone, with 4,096 blocks each, and 64 requests at a time. Other routers were
  measured on the same replay. `serial`: one prompt after the other, 2 ms each and 0.5 ms a block that is not cached.
  `instant`: every prompt takes the same time, so that nothing but the policy balances misses.
- *open*: eight prefill and four decode workers of `DENSE_32B`; requests come as stamped, so many times faster. Goodput
  is the share of requests that meet both a time to first token and a mean time per token.
- *found*: eight workers that serve alone, whose pools have 4,096 blocks and whose host memory four times that: what is
  found where a request is served, and anywhere, from where it can be pulled; beside one cache that forgets nothing.
- *split*: unified workers, of which a request may use one or two, against always one and always two.
- *family*: loads that are drawn from seeds (`routing.family`), and of each how much of the best single policy's goodput
  `pair_cost` has, at the worst of six pairs of objectives; told of these objectives, and without (*untold*). With
  `--drawings` each run is repeated with other names of workers, turns and draws, which mean nothing, and the means are
  compared: how far one policy then is from itself says how much of a difference is chance.

Reads Mooncake's conversation trace where it is; without it, makes up conversations of the same shape.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from report import Report, arguments
from routing.cell import GOAL, MAX_DRAWINGS, Cell
from routing.contest import Contest, hold
from routing.family import member
from routing.fleet import disaggregated, unified
from routing.hardware import DENSE_32B, INSTANT, SERIAL
from routing.outcome import Outcome, outcome, pooled_hit_rate
from routing.sheet import Sheet
from routing.trace import TracedRequest, parse_rows, read_trace, synthetic_rows, whole_blocks

from diptych.router.choose.policies import POLICIES
from diptych.router.workers.worker_view import Pair

TRACE: Final = Path(__file__).parents[2] / "shared/data/traces/mooncake_conversation_trace.jsonl"
NUM_CLOSED: Final = 3000
CONCURRENCY: Final = 64
TTFTS_S: Final = (0.3, 1.0, 5.0)
TPOTS_S: Final = (0.025, 0.050)
SPLIT_SPEEDS: Final = (1.0, 0.5, 1.5, 2.0)
CLOSED_COLUMNS: Final = ("hit rate", "CV requests", "CV missed", "makespan s", "p50 ms", "p99 ms")
GOODPUTS: Final = tuple((ttft_s, tpot_s) for tpot_s in TPOTS_S for ttft_s in TTFTS_S)
OPEN_COLUMNS: Final = (
    *("hit rate", "CV missed", "TTFT p50", "p90", "p99"),
    *(f"{ttft_s:g}s/{1000 * tpot_s:g}ms" for ttft_s, tpot_s in GOODPUTS),
)
MARKS: Final = (GOAL, 0.97)  # of the best other's goodput
FOUND_COLUMNS: Final = ("hit rate", "found anywhere", "CV missed", "TTFT p50", "p90", "p99")
HOST_BLOCKS: Final = 4 * 4096
PARTS: Final = ("closed", "open", "found", "split", "family")
FAMILY_COLUMNS: Final = (
    "worst cell",
    "there",
    "best other",
    "cells < 0.99",
    "untold worst",
    "< 0.99",
    "TTFT s",
    "best other's",
    "total s",
    "best's",
)
RATIO_COLUMNS: Final = (
    "worst",
    "mean",
    "no ratio above 1",
    "cells",
    *(f"< {mark}" for mark in MARKS),
    "beyond chance",
    "+/-",
)
FLOOR_COLUMNS: Final = ("cells", "spread", "widest", "itself < 0.99", "luckiest < 0.99", "one for all < 0.99")
CHOICES: Final[Mapping[str, Callable[[Pair], bool]]] = {
    "pair_cost": lambda pair: True,
    "always one": lambda pair: pair.is_local,
    "always two": lambda pair: not pair.is_local,
}


def main() -> None:
    args = _arguments()
    requests = read_trace(args.trace) if args.trace.exists() else parse_rows(synthetic_rows(12_000))
    if not args.json:
        print(f"{len(requests)} requests, {args.trace.name if args.trace.exists() else 'made up'}\n")
    speeds, sizes = ((3.0,), (4096,)) if args.quick else (args.speeds, (4096, 16384))
    shown = requests[:4000] if args.quick else requests
    report = Report(as_json=args.json)
    if "closed" in args.parts:
        closed(report, whole_blocks(requests[:NUM_CLOSED]), args.policies)
    if "open" in args.parts:
        for num_blocks, speed in itertools.product(sizes, speeds):
            open_loop(report, shown, args.policies, num_blocks, speed)
    if "found" in args.parts:
        found_anywhere(report, whole_blocks(shown), args.policies)
    if "split" in args.parts:
        for speed in SPLIT_SPEEDS[: 1 if args.quick else None]:
            split(report, shown, speed)
    if "family" in args.parts:
        seeds = range(*args.seeds)
        family(report, seeds[:2] if args.quick else seeds, args.drawings)


def closed(report: Report, requests: Sequence[TracedRequest], policies: Sequence[str]) -> None:
    bound = pooled_hit_rate(requests, 8 * 4096)
    for name, hardware in (("serial", SERIAL), ("instant", INSTANT)):
        fleet = replace(unified(8, hardware, 4096), may_pair=lambda pair: pair.is_local)
        title = f"closed, {name}: one cache of all blocks would hit {bound:.3f}"
        with Sheet(report, "routing_quality", title, f"closed {name}", CLOSED_COLUMNS, bound) as sheet:
            for policy in policies:
                jobs = fleet.replay(POLICIES[policy]).closed_loop(requests, CONCURRENCY)
                sheet.add(policy, _closed_row(outcome(jobs, fleet.prefill_ids)))


def open_loop(
    report: Report, requests: Sequence[TracedRequest], policies: Sequence[str], num_blocks: int, speed: float
) -> None:
    fleet = disaggregated(8, 4, DENSE_32B, num_blocks)
    rate = len(requests) / requests[-1].arrival_s * speed
    title = f"open, 8 x {num_blocks} blocks, {speed:g} times as fast: {rate:.1f} requests/s"
    with Sheet(report, "routing_quality", title, f"open {num_blocks} x{speed:g}", OPEN_COLUMNS) as sheet:
        for policy in policies:
            jobs = fleet.replay(POLICIES[policy]).open_loop(requests, speed)
            sheet.add(policy, _open_row(outcome(jobs, fleet.prefill_ids)))


def found_anywhere(report: Report, requests: Sequence[TracedRequest], policies: Sequence[str]) -> None:
    """Pool and host memory are one order of eviction: what leaves the first goes to the second."""
    fleet = replace(unified(8, DENSE_32B, 4096 + HOST_BLOCKS), may_pair=lambda pair: pair.is_local)
    limit = pooled_hit_rate(requests, sum(request.num_blocks for request in requests))
    title = f"found, 8 x (4096 + {HOST_BLOCKS}) blocks: one cache that forgets nothing would hit {limit:.3f}"
    with Sheet(report, "routing_quality", title, "found", FOUND_COLUMNS, limit) as sheet:
        for policy in policies:
            done = outcome(fleet.replay(POLICIES[policy]).open_loop(requests, 1.0), fleet.prefill_ids)
            sheet.add(policy, (done.hit_rate, done.found_rate, done.cv_missed, *done.ttft_percentiles()))


def split(report: Report, requests: Sequence[TracedRequest], speed: float) -> None:
    fleet = unified(8, DENSE_32B, 4096)
    title = f"split, 8 unified workers, {speed:g} times as fast"
    columns = ("mean TTFT s", "mean total s", "mean TPOT ms", *OPEN_COLUMNS[5:])
    with Sheet(report, "routing_quality", title, f"split x{speed:g}", columns) as sheet:
        for name, may_pair in CHOICES.items():
            limited = replace(fleet, may_pair=may_pair)
            found = outcome(limited.replay(POLICIES["pair_cost"]).open_loop(requests, speed), fleet.prefill_ids)
            sheet.add(name, (found.ttft_s.mean(), found.total_s.mean(), 1000 * found.tpot_s.mean(), *_goodputs(found)))


def family(report: Report, seeds: Sequence[int], num_drawings: int) -> None:
    contests = [hold(member(seed), num_drawings) for seed in seeds]
    title = f"family, seeds {seeds[0]} to {seeds[-1]}: pair_cost against the best of all others in each cell"
    with Sheet(report, "routing_quality", title, "family", FAMILY_COLUMNS) as sheet:
        for contest in contests:
            sheet.add(contest.name, _family_row(contest))
    with Sheet(report, "routing_quality", "all cells: pair_cost / best", "family all", RATIO_COLUMNS) as sheet:
        for name, held in _by_kind(contests).items():
            sheet.add(f"{name}, told", _ratio_row([cell for contest in held for cell in contest.cells]))
            sheet.add(f"{name}, untold", _ratio_row([cell for contest in held for cell in contest.untold_cells]))
    if num_drawings > 1:
        title = "the floor: each cell's best other against itself in other drawings, and the luckiest of another"
        with Sheet(report, "routing_quality", title, "family floor", FLOOR_COLUMNS) as sheet:
            for name, held in _by_kind(contests).items():
                sheet.add(name, _floor_row(held))


def _by_kind(contests: Sequence[Contest]) -> Mapping[str, Sequence[Contest]]:
    kinds = {
        "unified": [contest for contest in contests if contest.member.fleet.is_unified],
        "apart": [contest for contest in contests if not contest.member.fleet.is_unified],
    }
    return {name: held for name, held in kinds.items() if held}


def _family_row(contest: Contest) -> Sequence[float]:
    cell = min(contest.cells, key=lambda cell: cell.ratio)
    missed = float(sum(cell.ratio < GOAL for cell in contest.cells))
    untold = [cell.ratio for cell in contest.untold_cells]
    untold_missed = float(sum(ratio < GOAL for ratio in untold))
    others = contest.others.values()
    ttft_s, total_s = _mean_times(contest.untold)
    least_ttft_s, least_total_s = (min(times) for times in zip(*map(_mean_times, others), strict=True))
    goodputs = float(np.mean(cell.own)), float(np.mean(cell.best))
    return cell.ratio, *goodputs, missed, min(untold), untold_missed, ttft_s, least_ttft_s, total_s, least_total_s


def _mean_times(found: Sequence[Outcome]) -> tuple[float, float]:
    """Return the mean time to the first token, and that of the whole request."""
    return float(np.mean([one.ttft_s for one in found])), float(np.mean([one.total_s for one in found]))


def _ratio_row(cells: Sequence[Cell]) -> Sequence[float]:
    ratios = [cell.ratio for cell in cells]
    below = [float(sum(ratio < mark for ratio in ratios)) for mark in MARKS]
    lost, error = sum(cell.is_lost for cell in cells), sum(cell.error for cell in cells) / len(cells)
    means = float(np.mean(ratios)), float(np.mean(np.minimum(ratios, 1)))
    return min(ratios), *means, float(len(ratios)), *below, float(lost), error


def _floor_row(contests: Sequence[Contest]) -> Sequence[float]:
    cells = [cell for contest in contests for cell in contest.untold_cells]
    spreads = [cell.spread for cell in cells]
    failures = sum(cell.self_failures for cell in cells), sum(cell.floor_failures for cell in cells)
    missed = sum(contest.fewest_missed for contest in contests)
    return float(len(cells)), sum(spreads) / len(spreads), max(spreads), *failures, float(missed)


def _closed_row(found: Outcome) -> Sequence[float]:
    p50, _, p99 = found.ttft_percentiles()
    return found.hit_rate, found.cv_requests, found.cv_missed, found.makespan_s, 1000 * p50, 1000 * p99


def _open_row(found: Outcome) -> Sequence[float]:
    return found.hit_rate, found.cv_missed, *found.ttft_percentiles(), *_goodputs(found)


def _goodputs(found: Outcome) -> Sequence[float]:
    return [found.goodput(ttft_s, tpot_s) for ttft_s, tpot_s in GOODPUTS]


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="in Mooncake's format")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--seeds", nargs=2, type=int, default=[0, 24], help="of the family: the first, and one past the last"
    )
    parser.add_argument(
        "--drawings", type=int, default=1, choices=range(1, MAX_DRAWINGS + 1), help="of each member of the family"
    )
    parser.add_argument("--speeds", nargs="+", type=float, default=[1.0, 2.0, 4.0], help="of the open loop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
