"""How the kernels for prompts of recurrent layers are launched best: microseconds of each candidate, the fastest first.

Each candidate is the present launch with one thing changed. What is found goes to `LAUNCH` of `delta_chunks`,
`kimi_delta_chunks` and `mamba2_chunks`, or, of scans, to `choose_launch` of `chunk_scan`.

    python bench/gpu/tune_recurrent_prompts.py [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from delta_rule import Layers
from device_clock import seconds_each
from recurrent_prompts import Kimi, Mamba, Run, runs
from report import Report, arguments
from triton.runtime.errors import OutOfResources
from warm_cache import in_processes

from diptych.kernels.gpu.recurrent import delta_chunks, kimi_delta_chunks, mamba2_chunks
from diptych.kernels.gpu.recurrent.chunk_scan import ScanLaunch

PROMPTS: Final = ((1, 8192), (2, 4096), (16, 512))
SCANS: Final = (
    *(ScanLaunch(16, 4, num_stages) for num_stages in (2, 3)),
    *(ScanLaunch(32, warps, num_stages) for warps, num_stages in ((4, 1), (4, 2), (4, 3), (8, 2))),
    *(ScanLaunch(64, warps, num_stages) for warps, num_stages in ((4, 1), (4, 2), (4, 3), (8, 1), (8, 2))),
)
CANDIDATES: Final[dict[str, tuple[Any, dict[str, Sequence[Any]]]]] = {
    "delta rule": (
        delta_chunks.LAUNCH,
        {
            "conv_tokens": (8, 32, 64),
            "conv_warps": (2, 8),
            "chunk_warps": (8,),
            "norm_warps": (8,),
            "scan": SCANS,
        },
    ),
    "Kimi's delta rule": (
        kimi_delta_chunks.LAUNCH,
        {"decay_warps": (8,), "chunk_warps": (4, 16), "scan": SCANS},
    ),
    "state spaces": (mamba2_chunks.LAUNCH, {"chunk_warps": (4,), "scan": SCANS}),
}
Candidate = tuple[str, str, Any]  # of which rule, what is changed, the launch


def candidates() -> Iterator[Candidate]:
    for rule, (present, changes) in CANDIDATES.items():
        yield rule, "present", present
        for name, values in changes.items():
            for value in values:
                yield rule, f"{name} {_shown(value)}", present._replace(**{name: value})


def _shown(value: Any) -> str:
    """Columns, warps and stages of a scan."""
    return "{}c w{} s{}".format(*value) if isinstance(value, ScanLaunch) else str(value)


def rule_runs(rule: str, launch: Any, batch_size: int, length: int) -> list[Run]:
    new: dict[str, Callable[[], list[Run]]] = {
        "delta rule": lambda: Layers(batch_size, length).prompt_runs(launch),
        "Kimi's delta rule": lambda: runs(Kimi(batch_size, length, launch)),
        "state spaces": lambda: runs(Mamba(batch_size, length, launch)),
    }
    return new[rule]()


def compile_one(candidate: Candidate) -> None:
    """Into the cache on disk, as one after the other would take minutes."""
    rule, _, launch = candidate
    try:
        rule_runs(rule, launch, 1, 128)[0]()
    except OutOfResources:
        return


def microseconds(candidate: Candidate, batch_size: int, length: int) -> float | None:
    """None: it does not fit."""
    rule, _, launch = candidate
    try:
        return 1e6 * seconds_each(rule_runs(rule, launch, batch_size, length), rounds=10)
    except OutOfResources:
        return None


def main() -> None:
    options = arguments(__doc__).parse_args()
    every = list(candidates())
    in_processes(compile_one, every)
    with torch.inference_mode(), Report(as_json=options.json) as report:
        for prompts in PROMPTS[:1] if options.quick else PROMPTS:
            found = [(us, each) for each in every if (us := microseconds(each, *prompts)) is not None]
            for us, (rule, change, _) in sorted(found, key=lambda one: (one[1][0], one[0])):
                case = "{}, {} x {}, {}".format(rule, *prompts, change)
                report.row("gpu/tune_recurrent_prompts", case, us, "us")


if __name__ == "__main__":
    main()
