from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz, malformed
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.trust.tls import expires_s


@pytest.mark.parametrize("days", [-1, 30, 30_000], ids=["ended", "soon", "after 2049, which is written otherwise"])
def test_the_end_is_that_of_the_file_s_first_certificate(
    new_authority: Callable[[str], Any], tmp_path: Path, days: int
) -> None:
    authority = new_authority("authority")
    one, other = authority.sign(tmp_path / "one", days=days), authority.sign(tmp_path / "other", days=10)
    pem = b"what comes before\n" + one.cert.read_bytes() + other.cert.read_bytes()
    assert expires_s(pem) == pytest.approx(time.time() + days * 86_400, abs=300)


@fuzz
@given(data=st.data())
def test_what_is_no_certificate_is_a_value_error(
    new_authority: Callable[[str], Any], tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "member"
    if not folder.exists():
        new_authority("authority").sign(folder)
    with contextlib.suppress(ValueError):
        expires_s(data.draw(malformed((folder / "tls.crt").read_bytes())))
