"""Prints the JSON lines of benchmarks as tables, one a benchmark, as they end; other lines pass.

python bench/gpu/attention.py --json | tee attention.jsonl | python bench/table.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TextIO

from report import Report


def print_tables(lines: Iterable[str], out: TextIO) -> None:
    bench, report = "", Report(as_json=False)
    for line in lines:
        if not line.startswith('{"bench"'):
            out.write(line)
            continue
        fields = json.loads(line)
        if fields["bench"] != bench:
            report.close()
            bench = fields["bench"]
        report.row(**fields)
    report.close()


if __name__ == "__main__":
    print_tables(sys.stdin, sys.stdout)
