"""Whatever is tested only when deep checks are asked for, `make fuzz` tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKED = re.compile(r"environ\.get\(\"DIPTYCH_DEEP_CHECKS|^@of_each_kind", re.M)


def test_every_file_with_deep_checks_is_one_of_make_fuzz() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\nfuzz:")[1].split("\n\n")[0]
    patterns = re.findall(r"tests/\S+", recipe)
    played = {path for pattern in patterns for found in ROOT.glob(pattern) for path in (found, *found.rglob("*.py"))}
    deep = {path for path in (ROOT / "tests").rglob("test_*.py") if ASKED.search(path.read_text())}
    assert len(deep) > 5
    assert {str(path.relative_to(ROOT)) for path in deep - played} == set()
