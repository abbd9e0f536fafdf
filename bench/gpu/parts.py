"""Everything that a GPU can show of Diptych, part by part: its tests, its benchmarks, tables and pictures.

    make gpu                                    all parts that have not passed yet; run it again to go on
    make gpu ARGS="--budget-s 585"              begins no part that may run longer than that
    bench/gpu/run.sh [PART ...] [--quick]       these parts, whether they have passed or not
    bench/gpu/run.sh --list

A part that fails, or runs out of time, does not affect the others; rows that were measured before are kept. Each part
leaves `NAME.log`, `NAME.jsonl` and `NAME.end` in the folder of `--out`. Parts of another commit are run again. With two
GPUs, parts that need one run on both at once. Ends with 1 unless all that can run here passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from table import print_tables

ROOT: Final = Path(__file__).parents[2]
OUT_OF_TIME: Final = 124
NOT_KEPT: Final = 125  # what it printed


@dataclass(frozen=True, slots=True)
class Part:
    """A command that ends by itself, and within its limit."""

    name: str
    limit_s: int
    command: str  # `{quick}` and `{gpus}` are replaced
    num_gpus: int = 1


@dataclass(frozen=True, slots=True)
class End:
    """How a part ended."""

    code: int
    seconds: float
    commit: str
    machine: str  # the GPUs' names and numbers: rows of one table should come from one


def _tests(name: str, limit_s: int, where: str, num_gpus: int = 1) -> Part:
    options = "-q -m gpu -p no:cacheprovider -n 8 --timeout=300 -rfE"
    return Part(name, limit_s, f"python3 -m pytest {options} {where}", num_gpus)


def _table(name: str, limit_s: int, script: str, num_gpus: int = 1) -> Part:
    return Part(name, limit_s, f"python3 bench/gpu/{script} --json {{quick}}", num_gpus)


OF_TWO_GPUS: Final = (  # tests that the parts above skip, which have one each
    "tests/kernels/gpu/pages/test_page_mover.py",
    "tests/engine/tensor_parallel/test_communicator.py",
    "tests/engine/tensor_parallel/test_peer_sums.py",
    "tests/engine/tensor_parallel/test_shared_experts.py",
    "tests/engine/tensor_parallel/pipeline/test_stages_on_gpus.py",
    "tests/engine/runner/gpu",
)
PARTS: Final = (
    Part("check", 60, "python3 bench/gpu/setup_check.py"),
    _tests("tests_attention", 420, "tests/kernels/gpu/attention"),
    _tests("tests_layers", 580, "tests/kernels/gpu/layers"),
    _tests(
        "tests_kernels",
        420,
        "tests/kernels/gpu/pages tests/kernels/gpu/collectives tests/kernels/gpu/recurrent tests/kernels/gpu/sampling",
    ),
    _tests("tests_engine", 580, "tests/engine"),
    _tests("tests_transfer", 480, "-n 0 --confcutdir=tests/kvtransfer tests/kvtransfer", num_gpus=2),
    _tests("tests_two_gpus", 300, f"-m two_gpus -n 4 {' '.join(OF_TWO_GPUS)}", num_gpus=2),
    Part("sanitizer", 240, "bench/gpu/sanitizer.sh"),
    _table("roofline", 60, "roofline.py"),
    _table("parity", 360, "parity.py --gpus {gpus}"),
    _table("attention", 150, "attention.py"),
    _table("latents", 120, "latent_attention.py"),
    _table("sparse", 180, "sparse_attention.py"),
    _table("sinks", 60, "sink_attention.py"),
    _table("experts", 300, "mxfp4_experts.py"),
    _table("kept_experts", 300, "quantized_experts.py"),
    _table("fp8", 180, "fp8_products.py"),
    _table("deltas", 60, "delta_rule.py"),
    _table("recurrent", 90, "recurrent_prompts.py"),
    _table("launches", 240, "tune_recurrent_prompts.py"),
    _table("kernels", 80, "other_kernels.py"),
    _table("products", 60, "wide_products.py"),
    _table("decode", 160, "decode_step.py"),
    _table("prefill", 150, "prefill.py"),
    _table("integers", 240, "integer_products.py"),
    _table("decode_int4", 100, "decode_step.py --weights int4 --parts runner"),
    _table("deterministic", 120, "deterministic.py"),
    _table("drafts", 90, "draft_rows.py"),
    _table("draft_speed", 120, "draft_speed.py"),
    _table("decode_fp8", 100, "decode_step.py --weights fp8 --parts runner"),
    _table("prefill_fp8", 120, "prefill.py --weights fp8"),
    _table("defaults", 400, "defaults.py"),
    _table("host_tier", 120, "host_tier.py"),
    _table("lora", 150, "lora_steps.py"),
    _table("peers", 100, "peers.py"),
    _table("engines", 580, "whole_engines.py --budget-s 560"),
    _table("pd", 480, "pd.py", num_gpus=2),
    _table("cells", 580, "pd_cells.py --keep=dist/gpu/cells", num_gpus=2),
    _table("transfer", 400, "kv_transfer.py", num_gpus=2),
    _table("collectives", 90, "collectives.py", num_gpus=2),
    _table("shared_experts", 150, "shared_experts.py", num_gpus=2),
    _table("pipeline", 150, "pipeline.py", num_gpus=2),
    _table("layouts", 300, "kv_layouts.py", num_gpus=2),
    _table("ttft_mover", 120, "kv_ttft.py --path mover", num_gpus=2),
    _table("ttft_put", 120, "kv_ttft.py --path put", num_gpus=2),
)


def to_run(parts: Sequence[Part], ends: Mapping[str, End], commit: str) -> list[Part]:
    """Return those that have not passed at this commit."""
    return [
        part for part in parts if part.name not in ends or (ends[part.name].code, ends[part.name].commit) != (0, commit)
    ]


def next_part(waiting: Sequence[Part], free: Collection[int], left_s: float, num_gpus: int) -> Part | None:
    """Return what may begin now on the free ones of `num_gpus`: a part for all of them waits until all are free."""
    for part in waiting:
        needed = 1 if part.num_gpus == 1 else num_gpus
        if part.num_gpus <= num_gpus and needed <= len(free) and part.limit_s <= left_s:
            return part
    return None


class Runner:
    """Runs parts on the GPUs of this machine and keeps what they print."""

    def __init__(self, out: Path, gpus: Sequence[int], here: tuple[str, str], quick: bool) -> None:
        self._out = out
        self._gpus = gpus
        self._commit, self._machine = here
        self._quick = quick
        self._changed = threading.Condition()
        self._free = set(gpus)
        self.ends: dict[str, End] = {}

    def run(self, parts: Sequence[Part], budget_s: float) -> list[Part]:
        """Run what fits; return what did not begin."""
        waiting, until_s = list(parts), time.monotonic() + budget_s
        with self._changed:
            while waiting:
                part = next_part(waiting, self._free, until_s - time.monotonic(), len(self._gpus))
                if part is None and len(self._free) == len(self._gpus):
                    break
                if part is None:
                    self._changed.wait()
                    continue
                waiting.remove(part)
                self._begin(part)
            self._changed.wait_for(lambda: len(self._free) == len(self._gpus))
        return waiting

    def _begin(self, part: Part) -> None:
        gpus = sorted(self._free)[:1] if part.num_gpus == 1 else list(self._gpus)
        self._free.difference_update(gpus)
        threading.Thread(target=self._run_one, args=(part, gpus)).start()

    def _run_one(self, part: Part, gpus: Sequence[int]) -> None:
        began_s, end = time.monotonic(), End(NOT_KEPT, 0.0, self._commit, self._machine)
        try:
            code = self._call(part, gpus)
            end = replace(end, code=code, seconds=round(time.monotonic() - began_s, 1))
            (self._out / f"{part.name}.end").write_text(json.dumps(asdict(end)))
        finally:  # a full disk, say, must not keep a GPU from the other parts
            with self._changed:
                self.ends[part.name] = end
                self._free.update(gpus)
                print(f"== {part.name}: {said(end.code)} in {end.seconds} s", flush=True)
                self._changed.notify_all()

    def _call(self, part: Part, gpus: Sequence[int]) -> int:
        """Return the exit status; all that it printed is in its log, its rows in a file of their own."""
        visible = ",".join(map(str, gpus))
        command = part.command.replace("{quick}", "--quick" if self._quick else "").replace("{gpus}", str(len(gpus)))
        log = self._out / f"{part.name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],  # which says in the log what it does not find
                cwd=ROOT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(part.limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = OUT_OF_TIME
        rows = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"bench"')]
        (self._out / f"{part.name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
        return code


def said(code: int) -> str:
    return {0: "passed", OUT_OF_TIME: "out of time"}.get(code, f"failed, exit status {code}")


def here() -> tuple[str, str, list[int]]:
    """Return the commit, the machine, and the GPUs that torch finds."""
    import torch

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    gpus = list(range(torch.cuda.device_count()))
    found = [torch.cuda.get_device_properties(gpu) for gpu in gpus]
    machine = ", ".join(f"{each.name} {str(each.uuid)[:8]}" for each in found)
    return git("rev-parse", "--short", "HEAD") + changed, machine, gpus


def kept_ends(out: Path) -> dict[str, End]:
    """Return how the parts ended that ran before."""
    return {path.stem: End(**json.loads(path.read_text())) for path in out.glob("*.end")}


def show(out: Path, parts: Sequence[Part], ends: Mapping[str, End], left: Sequence[Part]) -> None:
    """Print the ends of what failed, all tables, and draw the pictures."""
    ran = [part.name for part in parts if part.name in ends]
    for name in ran:
        if ends[name].code:
            print(f"\n== {name}: {said(ends[name].code)}; the end of {out / name}.log:")
            print("\n".join((out / f"{name}.log").read_text(errors="replace").splitlines()[-15:]))
    for name in ran:
        lines = (out / f"{name}.jsonl").read_text().splitlines(keepends=True)
        if lines:
            print(f"\n== {name} ({ends[name].machine}, {ends[name].commit})")
            print_tables(lines, sys.stdout)
    files = [str(out / f"{name}.jsonl") for name in ran if (out / f"{name}.jsonl").stat().st_size]
    if files:
        subprocess.run([sys.executable, "bench/gpu/plots.py", *files, "--to", str(out)], cwd=ROOT, check=False)
    machines = {ends[name].machine for name in ran}
    if len(machines) > 1:
        print(f"rows are of {len(machines)} machines: compare none across them")
    failed = [f"{name} ({said(ends[name].code)})" for name in ran if ends[name].code]
    not_run = [f"{part.name} (needs {part.num_gpus} GPUs)" if part.num_gpus > 1 else part.name for part in left]
    print(f"== failed: {', '.join(failed) or 'none'}; not run: {', '.join(not_run) or 'none'}")


def chosen(names: Sequence[str]) -> list[Part]:
    """Return the parts of these names, in their order; all where there are none. Exits where one is not known."""
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}: {' '.join(known)} are")
    return [known[name] for name in names] or list(PARTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help="those to run, whether they have passed or not; none: what has not")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "gpu", help="keeps logs, rows and pictures")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin nothing that may take longer")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{part.name:<16} {part.limit_s:>4} s  {part.command}" for part in PARTS))
        return 0
    commit, machine, gpus = here()
    if not gpus:
        print("torch finds no GPU here: nothing was run (python bench/gpu/setup_check.py says what is missing)")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    parts, ends = chosen(options.part), kept_ends(options.out)
    runner = Runner(options.out, gpus, (commit, machine), options.quick)
    left = runner.run(parts if options.part else to_run(parts, ends, commit), options.budget_s)
    ends |= runner.ends
    show(options.out, parts, ends, left)
    possible = [part for part in left if part.num_gpus <= len(gpus)]
    return int(bool(possible) or any(ends[part.name].code for part in parts if part.name in ends))


if __name__ == "__main__":
    raise SystemExit(main())
