"""Finds the UCX to use and loads it, once a process, so that the shim binds to it.

Order: the folder in `$DIPTYCH_UCX_PATH`; the site's UCX if it has InfiniBand; the copy inside an installed NIXL wheel,
which has InfiniBand too; the `libucx` wheel; the site's without InfiniBand. Two UCX in one process disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

PATH_VARIABLE: Final = "DIPTYCH_UCX_PATH"
WHEELS: Final = ("nixl_cu13", "nixl_cu12", "libucx")  # best first
_LIBRARIES: Final = ("ucs", "uct", "ucp")  # in order of dependency
_REQUIRED: Final = ("ucs", "ucp")
_EARLY: Final = {  # what UCX reads while it is loaded
    "UCX_HANDLE_ERRORS": "none",  # signal handlers are the program's
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "fatal",  # a dead peer is an event of ours, not several errors of UCX's
}


@dataclass(frozen=True, slots=True)
class Ucx:
    """A loaded UCX."""

    version: str
    origin: str  # where it comes from, for logs
    folder: Path


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that holds UCX's libraries."""

    origin: str
    folder: Path


def candidates(environment: Mapping[str, str], site: Sequence[Path], wheels: Mapping[str, Path]) -> list[Candidate]:
    """Return where UCX is, best first. `wheels`: where packages are installed that may bring one."""
    if environment.get(PATH_VARIABLE):
        path = Path(environment[PATH_VARIABLE])
        return [Candidate(f"${PATH_VARIABLE}", path if path.is_dir() else path.parent)]
    local = [Candidate("site", folder) for folder in site if (folder / "libucp.so.0").exists()]
    found = [candidate for candidate in local if _has_infiniband(candidate.folder)]
    for name in WHEELS:
        if name in wheels:
            found.append(Candidate(f"{name} wheel", _wheel_folder(name, wheels[name])))
    return found + [candidate for candidate in local if candidate not in found]


@functools.cache
def load() -> Ucx:
    """Load the best UCX there is. Raises `ConfigError` that says how to get one."""
    for name, value in _EARLY.items():
        os.environ.setdefault(name, value)
    tried = []
    for candidate in candidates(os.environ, _site_folders(), _installed(WHEELS)):
        try:
            return _load(candidate)
        except OSError as error:
            tried.append(f"{candidate.origin}: {error}")
    reasons = "; ".join(tried) or "none found"
    raise ConfigError(f"no usable UCX ({reasons}): `pip install libucx-cu13`, or set ${PATH_VARIABLE} to its folder")


def include_folder(ucx: Ucx) -> Path:
    """Return UCX's headers: its own, or any, for the API is stable. Raises `ConfigError` if there are none."""
    wheel = _installed(["libucx"])
    folders = [ucx.folder.parent / "include", *(folder / "include" for folder in wheel.values())]
    for folder in [*folders, Path("/usr/include"), Path("/usr/local/include")]:
        if (folder / "ucp" / "api" / "ucp.h").exists():
            return folder
    raise ConfigError("no UCX headers: `pip install libucx-cu13`, or install libucx-dev")


def _load(candidate: Candidate) -> Ucx:
    for name in _LIBRARIES:
        path = _library_path(candidate.folder, name)
        if path is not None:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        elif name in _REQUIRED:
            raise OSError(f"lib{name} is not in {candidate.folder}")
    version = ctypes.CDLL(None).ucp_get_version_string
    version.restype = ctypes.c_char_p
    ucx = Ucx(version().decode(), candidate.origin, candidate.folder)
    logger.info("UCX %s from %s (%s)", ucx.version, ucx.folder, ucx.origin)
    return ucx


def _library_path(folder: Path, name: str) -> Path | None:
    """The library's file; in wheels its name may carry a hash."""
    for pattern in (f"lib{name}.so.0", f"lib{name}-*.so*"):
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    return None


def _has_infiniband(folder: Path) -> bool:
    return any((folder / "ucx").glob("libuct_ib*.so*"))


def _wheel_folder(name: str, package: Path) -> Path:
    return package / "lib" if name == "libucx" else package.parent / f"{name}.libs"


def _site_folders() -> list[Path]:
    search_path = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    prefixes = ("/opt/mellanox/ucx/lib", "/opt/ucx/lib", "/usr/local/lib", f"/usr/lib/{multiarch}", "/usr/lib64")
    return [*search_path, *map(Path, prefixes)]


def _installed(packages: Sequence[str]) -> dict[str, Path]:
    """The folders of those packages that are installed."""
    specs = {name: importlib.util.find_spec(name) for name in packages}
    return {name: Path(spec.origin).parent for name, spec in specs.items() if spec and spec.origin}
