"""Has Prometheus' own `promtool` evaluate expressions over scrapes, to compare with."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from promql import NAME, Labels, Scrape, Vector

_TEXT: Final = r'"(?:\\.|[^"\\])*"'
_FAILED: Final = re.compile(rf"expr: ({_TEXT}), time: .*\n\s+exp: nil\n\s+got: (.*)")
_SAMPLE: Final = re.compile(rf"{{((?:\w+={_TEXT}(?:, )?)*)}} ([^,\s]+)")
_LABEL: Final = re.compile(rf"(\w+)=({_TEXT})")


def evaluate(expressions: Sequence[str], scrapes: Sequence[Scrape], step_s: float, folder: Path) -> list[Vector]:
    """Return what each expression is at the last scrape; `step_s`: between two, from 0 on.

    It is told that nothing is expected, and says what it got instead.
    """
    moment = f"{scrapes[-1].time_s:g}s"
    case = {
        "interval": f"{step_s:g}s",
        "input_series": [_series(labels, scrapes) for labels in {key for each in scrapes for key in each.samples}],
        "promql_expr_test": [{"expr": each, "eval_time": moment, "exp_samples": []} for each in expressions],
    }
    path = folder / "case.json"  # YAML, too
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": f"{step_s:g}s", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=200, check=False)
    told = done.stdout + done.stderr
    found = {expression: _samples(got) for expression, got in _FAILED.findall(told)}
    return [found.get(json.dumps(expression), {}) for expression in expressions]


def _series(labels: Labels, scrapes: Sequence[Scrape]) -> dict[str, str]:
    own = dict(labels)
    name = own.pop(NAME)
    text = ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(own.items()))
    values: list[str] = []
    for scrape in scrapes:
        before = values[-1] if values else "_"
        missing = "_" if before in ("_", "stale") else "stale"
        values.append(repr(scrape.samples[labels]) if labels in scrape.samples else missing)
    return {"series": f"{name}{{{text}}}", "values": " ".join(values)}


def _samples(got: str) -> Vector:
    return {
        frozenset((label, json.loads(value)) for label, value in _LABEL.findall(labels)): float(value)
        for labels, value in _SAMPLE.findall(got)
    }
