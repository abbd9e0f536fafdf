"""What importing costs each command and each process: processor time of a fresh interpreter, the least of many.

    python bench/imports.py [--against CHECKOUT] [--only WORD] [--rounds N] [--quick] [--json]

With `--against` the modules of another checkout are imported in turns with ours, by the same interpreter with the same
libraries; its time is the limit. Byte code is compiled before. As `diptych` does, nobody looks for garbage meanwhile.
A scheduler is measured with its transport, UCX. It imports torch, and what computes, once the model is known: that is
not in these times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import report

BENCH: Final = "imports"
OURS: Final = Path(__file__).parents[1]
ROOTS: Final = ("kernels", "kvtransfer", "proto", "services")
PROCESSES: Final[Mapping[str, str]] = {
    "a scheduler": "import diptych.unified.scheduler, diptych.kvtransfer.ucx",
    "checks of grammars": "import diptych.grammars.check_process",
    "Engine": "from diptych.engine import Engine",
}
COMMANDS: Final = "from diptych.cli.main import COMMANDS; [print(k, v.module, sep='=') for k, v in COMMANDS.items()]"
TIMED: Final = "import gc, time; gc.disable(); {}; print(1e3 * time.process_time())"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A tree of this project, and where the byte code of all that it imports is kept."""

    root: Path
    byte_code: Path

    def run(self, statements: str) -> str | None:
        """Return what a fresh interpreter prints; None if it fails, as for what this checkout does not have."""
        paths = [*(str(self.root / each) for each in ROOTS), sysconfig.get_path("purelib")]
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONPYCACHEPREFIX": str(self.byte_code)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [sys.executable, "-S", "-c", statements]  # -S: no path to the modules that are installed
        ended = subprocess.run(command, env=environment | own, cwd="/", capture_output=True, text=True, check=False)
        return ended.stdout if ended.returncode == 0 else None

    def statements(self) -> Mapping[str, str]:
        """Return what is imported under each name."""
        commands = [line.split("=") for line in (self.run(COMMANDS) or "").splitlines()]
        imports = {f"diptych {name}": f"import diptych.cli.main, {module}" for name, module in commands}
        return {"diptych --help": "import diptych.cli.main", **imports, **PROCESSES}


def least_ms(checkouts: Mapping[Checkout, str | None], rounds: int) -> list[float | None]:
    """Import in turns, so that whatever else the machine does disturbs all alike. The first round compiles."""
    times: dict[Checkout, list[float]] = {each: [] for each in checkouts}
    for number in range(rounds + 1):
        for checkout, statement in checkouts.items():
            printed = checkout.run(TIMED.format(statement)) if statement else None
            if printed and number:
                times[checkout].append(float(printed))
    return [min(each, default=None) for each in times.values()]


def main() -> None:
    """Measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", default="", help="cases with this word in their name")
    parser.add_argument("--rounds", type=int, default=12, help="interpreters a case and checkout")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder, report.Report(as_json=options.json) as out:
        roots = [OURS, *([options.against.resolve()] if options.against else [])]
        statements = {
            each: each.statements()
            for each in (Checkout(root, Path(folder, str(number))) for number, root in enumerate(roots))
        }
        for name in next(iter(statements.values())):
            if options.only not in name:
                continue
            ours, *others = least_ms({each: named.get(name) for each, named in statements.items()}, rounds)
            if ours is None:
                raise SystemExit(f"{name}: the import fails")
            limit = next(iter(others), None)
            out.row(BENCH, name, ours, "ms", limit, str(options.against), limit / ours if limit else None)


if __name__ == "__main__":
    main()
