"""Which UCX is taken, and that the shim builds with every compiler we promise."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.common.native import build_library
from diptych.kvtransfer.ucx import binding, loader
from diptych.kvtransfer.ucx.loader import Candidate, candidates
from diptych.kvtransfer.ucx.options import ucx_settings


def ucx_folder(path: Path, *, infiniband: bool) -> Path:
    (path / "ucx").mkdir(parents=True)
    (path / "libucp.so.0").touch()
    if infiniband:
        (path / "ucx" / "libuct_ib.so.0").touch()
    return path


def test_a_site_with_infiniband_comes_first_and_one_without_it_last(tmp_path: Path) -> None:
    plain = ucx_folder(tmp_path / "plain", infiniband=False)
    fast = ucx_folder(tmp_path / "fast", infiniband=True)
    wheels = {"libucx": tmp_path / "libucx", "nixl_cu13": tmp_path / "nixl_cu13"}
    assert candidates({}, [plain, tmp_path / "none", fast], wheels) == [
        Candidate("site", fast),
        Candidate("nixl_cu13 wheel", tmp_path / "nixl_cu13.libs"),
        Candidate("libucx wheel", tmp_path / "libucx" / "lib"),
        Candidate("site", plain),
    ]


@pytest.mark.parametrize("name", ["", "libucp.so.0"])
def test_an_explicit_path_is_the_only_candidate(tmp_path: Path, name: str) -> None:
    folder = ucx_folder(tmp_path / "mine", infiniband=False)
    fast = ucx_folder(tmp_path / "fast", infiniband=True)
    environment = {"DIPTYCH_UCX_PATH": str(folder / name)}
    assert candidates(environment, [fast], {"libucx": tmp_path}) == [Candidate("$DIPTYCH_UCX_PATH", folder)]


def test_without_any_ucx_the_error_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_UCX_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install libucx"):
        loader.load.__wrapped__()


def test_settings_of_the_environment_are_the_users_choice() -> None:
    settings = ucx_settings("auto", {"UCX_TCP_TX_SEG_SIZE": "1M"})
    assert "TCP_TX_SEG_SIZE" not in settings
    assert settings["MM_ERROR_HANDLING"] == "y"
    assert "TLS" not in settings


def test_transports_that_were_asked_for_are_not_the_environments_choice() -> None:
    assert ucx_settings("tcp", {"UCX_TLS": "all"})["TLS"] == "tcp,self"


@pytest.mark.integration
@pytest.mark.parametrize("compiler", ["cc", f"{sys.executable} -m ziglang cc"])
def test_the_shim_builds_and_binds_to_the_loaded_ucx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    if "ziglang" in compiler and importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    loader.load()
    built = binding.build()
    assert ctypes.CDLL(str(built)).kvt_create
    assert binding.build() == built
    assert list(built.parent.iterdir()) == [built]


@pytest.mark.integration
def test_a_failed_build_shows_the_compilers_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(tmp_path))
    source = tmp_path / "broken.c"
    source.write_text("int broken(void) { return missing_name; }")
    with pytest.raises(ConfigError, match="missing_name"):
        build_library(source)
