"""Two GPUs as one prefill and one decode worker, against the same two as replicas that do both: the same load on both.

All processes are real. Llama-3-8B by shape with made-up weights, prompts that nobody has cached, Poisson arrivals, the
same for both. Time to first token counts from when a request was due. *Goodput*: requests/s that meet both a time to
first token and a mean time per output token; its limit is what was asked for. Limits of times: the arithmetic of the
prompt alone at the speed of a matrix product, and one read of the weights at the speed of a copy, measured by
`roofline.py` in the same run.

    python bench/gpu/pd.py [--workloads 2000/1000@5 ...] [--seconds 20] [--quick] [--json]
    python bench/gpu/pd.py --device cpu      # the same with a tiny model: shows that it works, measures nothing
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from llama_8b import CONFIG, model_folder
from pd_figures import Limits, add_hand_off, add_to_report, figures, limits_of
from pd_load import Served, Workload
from pd_site import PREFILL_AND_DECODE, REPLICAS, TOGETHER, Front, Gpus, Site, begin, wait
from report import Report, arguments

from diptych.architectures.config import ModelConfig
from diptych.checkpoints.source import open_model

WORKLOADS: Final = ("2000/1000@5", "4000/500@4", "8000/200@2", "2000/1000@8", "4000/500@7", "8000/200@3.5")
TOKEN_S: Final = 0.007  # of output, or so: warm-up lasts until as many requests run as will
WAKE: Final = "64/400@50"  # before all: batches of every size, so that no graph is captured while we measure
WAKE_S: Final = 4.0
SLACK_S: Final = 40.0  # for the last requests to end
MEMORY_SHARE: Final = 0.88  # of a GPU's memory, for the platforms together
TINY: Final = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY_WORKLOADS: Final = ("64/16@4", "128/8@4")
GPU_OPTIONS: Final[Mapping[str, Any]] = {"device": "cuda", "max-requests": 256}
CPU_OPTIONS: Final[Mapping[str, Any]] = {"device": "cpu", "kv-cache-mib": 64, "num-threads": 1}


@dataclass(frozen=True, slots=True)
class Platform:
    """One way to use two GPUs, with the further options of its workers."""

    fronts: tuple[Gpus, ...]
    role_options: Mapping[str, Mapping[str, Any]]


def mixed(step_tokens: int) -> Mapping[str, Mapping[str, Any]]:
    return {"unified": {"max-step-tokens": step_tokens}}


PLATFORMS: Final[Mapping[str, Platform]] = {
    "replicas": Platform(REPLICAS, mixed(2048)),
    "replicas-512": Platform(REPLICAS, mixed(512)),  # shorter gaps between tokens, later first ones
    "1P1D": Platform(PREFILL_AND_DECODE, {"prefill": {"max-step-tokens": 8192}}),
    "adaptive": Platform(TOGETHER, {"router": {"policy": "adaptive"}, **mixed(8192)}),
}
COMPARED: Final = ("1P1D", "replicas")


def asked(workload: Workload) -> list[Served]:
    """Have a process of its own ask for it. Return what became of the requests that count."""
    timeout_s = workload.warm_up_s + workload.seconds + 2 * workload.slack_s
    command, words = [sys.executable, "-m", "pd_load"], json.dumps(asdict(workload)).encode()
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, input=words, stdout=subprocess.PIPE, check=True, timeout=timeout_s)
    return [Served(**each) for each in json.loads(done.stdout)]


def load(workload: Workload) -> tuple[list[Served], float]:
    """Return what was served, and the requests/s that were due."""
    served = asked(workload)
    failed = [each.failure for each in served if each.failure or not each.stamps_s]
    if failed:
        print(f"{len(failed)} of {len(served)} requests failed: {failed[:2]}", file=sys.stderr)
    good = [each for each in served if not each.failure and each.stamps_s]
    return good, len(served) / workload.seconds


def measure(report: Report, options: Namespace, site: Site, config: ModelConfig) -> int:
    """Start all platforms at once, and ask one after the other: who is not asked leaves its GPUs idle.

    Return 1 if one did not start, or served nothing.
    """
    code = 0
    with ExitStack() as stack:
        fronts = started(stack, options.platforms, site)
        ports = {name: [front.http_port for front in each] for name, each in fronts.items()}
        if site.with_gpus:
            for each in ports.values():
                wake(each, config)
        for what in options.workloads:
            known: dict[str, dict[str, float]] = {}
            for name, each in ports.items():
                workload = workload_of(what, each, options.seconds, config)
                found = _ask(report, name, f"{name} {what}/s", known, workload, limits_of(config, workload))
                known |= {name: found} if found else {}
                code |= not found
    return code | (len(ports) < len(options.platforms))


def _ask(
    report: Report,
    name: str,
    case: str,
    known: Mapping[str, Mapping[str, float]],
    workload: Workload,
    limits: Limits | None,
) -> dict[str, float]:
    """Ask one platform; report, and return, what was found: nothing where nothing was served."""
    served, rate = load(workload)
    if not served:
        return {}
    mine = figures(served, workload.seconds)
    add_to_report(report, case, mine, known, rate, limits)
    if PLATFORMS[name].fronts is PREFILL_AND_DECODE:
        add_hand_off(report, case, served)
    return mine


def started(stack: ExitStack, names: Sequence[str], site: Site) -> dict[str, list[Front]]:
    """Return the routers of each platform that starts; one that does not is told, and costs no other."""
    share = {"gpu-memory-share": round(MEMORY_SHARE / len(names), 3)} if site.with_gpus else {}
    each = replace(site, worker_options={**share, **site.worker_options})
    fronts = {
        name: [begin(stack, each, gpus, PLATFORMS[name].role_options) for gpus in PLATFORMS[name].fronts]
        for name in names
    }
    found = {}
    for name in names:
        try:
            wait(fronts[name])
            found[name] = fronts[name]
        except SystemExit as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found


def wake(ports: Sequence[int], config: ModelConfig) -> None:
    """Ask for batches of every size."""
    load(replace(workload_of(WAKE, ports, WAKE_S, config), warm_up_s=0.0))


def workload_of(what: str, ports: Sequence[int], seconds: float, config: ModelConfig) -> Workload:
    """Return the load that `what` names, as in 2000/1000@5."""
    lengths, _, rate = what.partition("@")
    prompt_len, num_tokens = map(int, lengths.split("/"))
    shape = (ports, prompt_len, num_tokens, float(rate), seconds, min(1.0 + TOKEN_S * num_tokens, seconds))
    return Workload(*shape, vocab_size=config.vocab_size, model=config.model_id, seed=prompt_len, slack_s=SLACK_S)


def arguments_of() -> Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=list(COMPARED))
    parser.add_argument("--workloads", nargs="+", help="prompt/output tokens @ requests/s, as in 2000/1000@5")
    parser.add_argument("--seconds", type=float, help="in which requests count")
    parser.add_argument("--log-level", default="error", help="of bootstraps, workers and routers")
    options = parser.parse_args()
    names = WORKLOADS if options.device == "cuda" else TINY_WORKLOADS
    options.workloads = options.workloads or names[: 1 if options.quick else None]
    options.seconds = options.seconds or (20.0 if options.device == "cuda" and not options.quick else 6.0)
    return options


def main() -> int:
    options = arguments_of()
    on_gpus = options.device == "cuda"
    with model_folder(CONFIG if on_gpus else {**CONFIG, **TINY, **TINY_HEADS}) as folder:
        site = Site(str(folder), GPU_OPTIONS if on_gpus else CPU_OPTIONS, options.log_level, with_gpus=on_gpus)
        with Report(as_json=options.json) as report:
            return measure(report, options, site, open_model(str(folder), "dummy").config)


if __name__ == "__main__":
    raise SystemExit(main())
