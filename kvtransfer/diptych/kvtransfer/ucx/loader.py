"""Finds the UCX to use and loads it, once a process, so that the shim binds to it.

Order: the folder in `$DIPTYCH_UCX_PATH`; the site's `libucp.so.0` if it has InfiniBand; the copy inside an installed
NIXL wheel, which has InfiniBand too; the `libucx` wheel; the site's without InfiniBand.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

PATH_VARIABLE: Final = "DIPTYCH_UCX_PATH"
_LIBRARIES: Final = ("ucs", "uct", "ucp")  # in order of dependency; ucs brings ucm
_REQUIRED: Final = ("ucs", "ucp")
_QUIET: Final = {"UCX_HANDLE_ERRORS": "none", "UCX_WARN_UNUSED_ENV_VARS": "n"}


@dataclass(frozen=True, slots=True)
class Ucx:
    """A loaded UCX."""

    version: str
    origin: str  # where it comes from, for logs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that holds UCX libraries, or None for the system's search path."""

    origin: str
    folder: Path | None


def candidates() -> Iterator[Candidate]:
    """Yield where UCX may be, best first."""
    explicit = os.environ.get(PATH_VARIABLE)
    if explicit:
        yield Candidate(f"${PATH_VARIABLE}", Path(explicit))
        return
    site = Candidate("site library", None)
    if ctypes.util.find_library("ucp") and _site_has_infiniband():
        yield site
    for package in ("nixl_cu13", "nixl_cu12"):
        folder = _package_folder(package)
        if folder is not None:
            yield Candidate(f"{package} wheel", folder.parent / f"{package}.libs")
    folder = _package_folder("libucx")
    if folder is not None:
        yield Candidate("libucx wheel", folder / "lib")
    if ctypes.util.find_library("ucp"):
        yield site


@functools.cache
def load() -> Ucx:
    """Load the best UCX there is. Raises `ConfigError` that says how to get one."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)  # UCX reads them while it is loaded
    tried = []
    for candidate in candidates():
        try:
            return _load(candidate)
        except OSError as error:
            tried.append(f"{candidate.origin}: {error}")
    reasons = "; ".join(tried) or "none found"
    raise ConfigError(f"no usable UCX ({reasons}): `pip install libucx-cu13`, or set ${PATH_VARIABLE} to its folder")


def include_folder() -> Path:
    """Return the folder of UCX's headers. Raises `ConfigError` if there is none."""
    wheel = _package_folder("libucx")
    for folder in ([wheel / "include"] if wheel else []) + [Path("/usr/include"), Path("/usr/local/include")]:
        if (folder / "ucp" / "api" / "ucp.h").exists():
            return folder
    raise ConfigError("no UCX headers: `pip install libucx-cu13`, or install libucx-dev")


def _load(candidate: Candidate) -> Ucx:
    for name in _LIBRARIES:
        path = _library_path(candidate.folder, name)
        if path is not None:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        elif name in _REQUIRED:
            raise OSError(f"lib{name} is not in {candidate.folder}")
    version = ctypes.CDLL(None).ucp_get_version_string
    version.restype = ctypes.c_char_p
    ucx = Ucx(version().decode(), candidate.origin)
    logger.info("UCX %s from the %s", ucx.version, ucx.origin)
    return ucx


def _library_path(folder: Path | None, name: str) -> str | None:
    """The library's file; in wheels its name may carry a hash."""
    if folder is None:
        return f"lib{name}.so.0"
    for pattern in (f"lib{name}.so.0", f"lib{name}.so", f"lib{name}-*.so*"):
        found = sorted(folder.glob(pattern))
        if found:
            return str(found[0])
    return None


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _site_has_infiniband() -> bool:
    folders = ("/usr/lib/x86_64-linux-gnu/ucx", "/usr/lib64/ucx", "/usr/lib/ucx", "/opt/ucx/lib/ucx")
    return any(any(Path(folder).glob("libuct_ib*.so*")) for folder in folders)
