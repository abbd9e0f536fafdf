"""Files that are read again when they change, whatever the clock that dates them says."""

from __future__ import annotations

import os
from pathlib import Path

from diptych.common.trust.reloaded import Reloaded

HOUR_NS = 3600 * 10**9


def test_a_file_that_is_dated_back_is_read_again_and_one_from_the_future_too(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one")
    reloaded = Reloaded([path], path.read_text)
    for text, hours in (("two", -5), ("six", 5), ("ten", -1)):  # of equal size, in the same file
        path.write_text(text)
        dated_ns = path.stat().st_mtime_ns + hours * HOUR_NS
        os.utime(path, ns=(dated_ns, dated_ns))
        assert reloaded.current() == text
