"""Tests for `diptych.common.net.object_stores`."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.common.net.object_stores import open_objects

pytest.importorskip("obstore", reason="comes with diptych[store]")


def test_where_there_are_no_certificates_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = tmp_path / "none.pem"
    none.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(none))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    with pytest.raises(ConfigError, match=r"^s3://bucket can't be used: there are no CA certificates here.*SSL_CERT_"):
        open_objects("s3://bucket", "s3://bucket", {})
