"""Times how soon a worker is loaded that takes its weights from a running one, beside one that reads them from disk.

Real processes: bootstrap, a worker that serves, and then others, in turn with `--weights-from peers` and from disk.
Timed is from the start of the process until its startup probe answers; what was taken, and how long that alone took, is
said by the worker. With `--device cuda` the model is Llama-3-8B by shape, in bfloat16, with made-up weights that are
written to a folder first; the worker that serves is on GPU 0, the others are on GPU 1. A disk is read through the page
cache of the system: `--cold` drops the files from it before each start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from diptych.checkpoints.dummy import DummyModel
from diptych.common.net.ports import free_ports

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

TOOK: Final = re.compile(r"took ([\d.]+) GB of weights from \S+ in ([\d.]+) s")
TIMEOUT_S: Final = 300.0
POLL_S: Final = 0.01


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="smollm2", help="on CPUs, or a folder that is there already")
    parser.add_argument("--folder", type=Path, help="where the model for GPUs is written; not given: a temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each start")
    options = parser.parse_args()
    with ExitStack() as stack:
        model = options.model
        if options.device == "cuda" and model == "smollm2":
            folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llama-8b-")))
            model = str(written(folder))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weights-")))
        measure(stack, logs, model, options)


def measure(stack: ExitStack, logs: Path, model: str, options: argparse.Namespace) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    stack.enter_context(process(logs / "bootstrap", "bootstrap", "--port", str(port)))
    common = ("--model", model, "--device", options.device, "--bootstrap", f"127.0.0.1:{port}")
    _, first_s, _ = stack.enter_context(worker(logs / "first", *common, "--weights-from", "peers"))
    print(f"the worker that serves was loaded after {first_s:.2f} s, from disk")
    found: dict[str, list[float]] = {"peers": [], "disk": []}
    taking = list[tuple[float, float]]()
    second = ("--base-gpu", "1") if options.device == "cuda" else ()
    for number in range(options.rounds):
        for source, seconds in found.items():
            drop(model, options.cold)
            log = logs / f"{source}-{number}"
            with worker(log, *common, *second, "--weights-from", source) as (_, took_s, said):
                seconds.append(took_s)
                taking += [(float(gb), float(s)) for gb, s in TOOK.findall(said)]
    report(found, taking, options.rounds)


def report(found: dict[str, list[float]], taking: list[tuple[float, float]], num_rounds: int) -> None:
    for source, seconds in found.items():
        each = ", ".join(f"{s:.2f}" for s in seconds)
        print(f"{source:>6}: loaded after {statistics.median(seconds):.2f} s (median of {each})")
    if len(taking) < num_rounds:
        print(f"weights were taken in {len(taking)} of {num_rounds} starts: see the logs")
    for gb, took_s in taking:
        print(f"        took {gb:.2f} GB in {took_s:.2f} s, {gb / max(took_s, 0.01):.2f} GB/s")


@contextmanager
def process(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a component until the exit."""
    environment = {**os.environ, "DIPTYCH_INSECURE": "1"}
    with log.open("wb") as output:
        full = [sys.executable, "-m", "diptych.cli", *command]
        started = subprocess.Popen(full, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def worker(log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], float, str]]:
    """Run a worker; yield it once it is loaded, after how many seconds that was, and what it has said."""
    (health,) = free_ports("127.0.0.1", 1)
    began_s = time.perf_counter()
    with process(log, "unified", "--health-port", str(health), "--drain-s", "0", *options) as started:
        while not is_loaded(health):
            if started.poll() is not None or time.perf_counter() - began_s > TIMEOUT_S:
                raise SystemExit(f"the worker did not load:\n{log.read_text()[-3000:]}")
            time.sleep(POLL_S)
        yield started, time.perf_counter() - began_s, log.read_text()


def is_loaded(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/startup", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def drop(model: str, is_cold: bool) -> None:
    """Have the system forget the files of a folder."""
    for path in Path(model).glob("*.safetensors") if is_cold else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def written(folder: Path) -> Path:
    """Write Llama-3-8B by shape in bfloat16, unless it is there."""
    from llama_8b import CONFIG  # of bench/gpu

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "model.safetensors"
    if not path.exists():
        write_safetensors(path, DummyModel(folder))
    return folder


def write_safetensors(path: Path, model: DummyModel) -> None:
    """Two passes: where everything is, and then what it is."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.blanks():
        begin, end = end, end + 2 * tensor.size
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in model.tensors():
            flat = np.ascontiguousarray(tensor, np.float32).reshape(-1)
            for start in range(0, len(flat), 1 << 24):
                file.write((flat[start : start + (1 << 24)].view(np.uint32) >> 16).astype(np.uint16).tobytes())
    partial.rename(path)


if __name__ == "__main__":
    main()
