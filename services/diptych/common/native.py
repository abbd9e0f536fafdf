"""Compiles the C sources of this repository once, and keeps the library in a cache.

The libraries have no Python ABI: plain C functions called through ctypes. The compiler is `$CC`, the system's `cc`, or
the one in the `ziglang` wheel. The cache key covers source, flags and machine, so a changed file rebuilds by itself.

`$DIPTYCH_MARCH` names a processor, as `x86-64-v3`, instead of this machine's: libraries that are compiled for it can be
copied to other machines, which then need no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from diptych.common.errors import ConfigError

logger = logging.getLogger(__name__)

MARCH_VARIABLE: Final = "DIPTYCH_MARCH"
_NATIVE: Final = "native"

Library = TypeVar("Library", bound=ctypes.CDLL)
Signatures = Mapping[str, tuple[Any, Sequence[Any]]]  # by name: types of the result, None for none, and of arguments


def cache_dir() -> Path:
    """Return the folder for built libraries and fetched models: `$DIPTYCH_CACHE_DIR`, else `~/.cache/diptych`."""
    return Path(os.environ.get("DIPTYCH_CACHE_DIR") or Path.home() / ".cache" / "diptych")


def build_library(
    source: Path,
    *,
    parts: Sequence[Path] = (),
    header_dirs: Sequence[Path] = (),
    include_dirs: Callable[[], Sequence[Path]] = tuple,
    flags: Sequence[str] = (),
) -> Path:
    """Return the shared library built from `source`, compiling it if the cache has none.

    `parts` are files of ours that `source` includes, beside the headers in its folder; `header_dirs` hold more headers
    of ours, that may change; `include_dirs` those of others, which only compiling needs.

    Safe against concurrent callers: each builds into a file of its own and renames it into place. Raises
    `ConfigError` with the compiler's words when there is no compiler or the build fails.
    """
    march = os.environ.get(MARCH_VARIABLE) or _NATIVE
    options = ["-shared", "-fPIC", "-O3", *(flag.replace("=native", f"={march}") for flag in flags)]
    headers = (header for path in (source.parent, *header_dirs) for header in sorted(path.glob("*.h")))
    sources = [source, *headers, *parts]
    key = _key(sources, [*options, march, *_machine(march)])
    target = cache_dir() / "native" / f"{source.stem}-{key}.so"
    if not target.exists():
        options += [f"-I{path}" for path in (*header_dirs, *include_dirs())]
        try:
            _compile(_compiler(), source, options, target)
        except OSError as error:
            raise ConfigError(
                f"{source.name} can't be compiled into {target.parent}: {error.strerror}; name a folder that can be"
                " written by DIPTYCH_CACHE_DIR"
            ) from error
    return target


def _machine(march: str) -> list[str]:
    """What else a library depends on: code for a named processor only on its kind, whoever compiled it."""
    return [*_compiler(), platform.machine(), _cpu_model()] if march == _NATIVE else [platform.machine()]


def _compiler() -> list[str]:
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise ConfigError("no C compiler found: install one (cc, gcc or clang), or `pip install ziglang`, or set CC")


def declare(library: Library, prefix: str, signatures: Signatures) -> Library:
    """Return `library`, whose functions `<prefix>_<name>` know what they return and take."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"{prefix}_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _key(sources: Sequence[Path], words: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:16]


def _cpu_model() -> str:
    """The processor's name and features: `-march=native` code must not travel in a shared home directory."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    return "".join(
        line for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if line.startswith(("model name", "flags"))
    )


def _compile(compiler: Sequence[str], source: Path, options: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [*compiler, str(source), "-o", str(built), *_spelled(options, compiler)]
        logger.info("compiling %s", source.name)
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ConfigError(f"compiling {source.name} failed: {shlex.join(command)}\n{result.stderr[-2000:]}")
        os.replace(built, target)


def _spelled(options: Sequence[str], compiler: Sequence[str]) -> list[str]:
    """Zig's compiler writes the names of processors its own way: x86_64_v3."""
    if "ziglang" not in compiler:
        return list(options)
    marches = {
        option: "-march=" + option[len("-march=") :].replace("-", "_") for option in options if "-march=" in option
    }
    return [marches.get(option, option) for option in options]
