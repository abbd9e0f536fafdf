"""Finds the platform that a command is about: the one it was told, else the one of our user that runs here.

Rule: each option or variable that was given wins by itself. Tokens that a platform made for its commands are
sent to that platform only. Where several run, none is guessed.

Each `diptych up` writes a file about itself. The files lie in a folder that is ours alone: `$XDG_RUNTIME_DIR/diptych`,
or one for our user among the temporary files. They hold addresses and the paths of tokens and certificates, no secret.

Rule: a folder or file that others own, read or write, or that is a symbolic link, is refused, never followed. A
file's name holds the process and its start time, so the file of a killed process is recognised and removed by readers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from diptych.common.config import from_namespace, option
from diptych.common.errors import ConfigError
from diptych.common.proc import started_at
from diptych.common.trust.trust import TrustConfig

T = TypeVar("T", bound=TrustConfig)
M = TypeVar("M", bound="MembersConfig")

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:7000"
PLATFORM_HELP: Final = "where several run here: a port of the one that is meant"
_NAME: Final = re.compile(r"\.?(\d+)-(\d+)\.json")  # process and start; the dot: it is being written
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_MAX_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class LocalPlatform:
    """What commands need to know of a platform."""

    http: str  # host:port of the router's HTTP API
    grpc: str
    bootstrap: str
    model: str
    trust: Mapping[str, str]  # variables by which a command is let in

    @property
    def name(self) -> str:
        """By which it is listed."""
        return _port(self.http)

    @property
    def ports(self) -> tuple[str, ...]:
        """What `--platform` takes. All listen for bootstrap at one address, so that port is no other platform's."""
        return self.name, _port(self.grpc), _port(self.bootstrap)


def runtime_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where platforms of our user announce themselves."""
    given = environ.get("XDG_RUNTIME_DIR", "")
    if given and os.path.isdir(given) and os.stat(given).st_uid == os.geteuid():
        return Path(given, "diptych")
    return Path(_temporary(), f"diptych-{os.geteuid()}")


def _temporary() -> str:
    import tempfile  # where there is no folder for the user: it brings every way to pack files

    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written, so nobody is announced there
        return "/tmp"


@contextlib.contextmanager
def announced(platform: LocalPlatform, folder: Path) -> Iterator[None]:
    """Have commands find a platform until the exit. Raises `ConfigError` if they could not trust what they find."""
    start = started_at(os.getpid())
    if start is None:
        raise ConfigError("this system has no /proc by which commands could see that the platform runs")
    name = f"{os.getpid()}-{start}.json"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    with _opened(folder) as here:
        _write(here, name, json.dumps(dataclasses.asdict(platform), indent=2))
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=here)


def running(folder: Path) -> tuple[LocalPlatform, ...]:
    """Return the platforms that run, in the order of their start. Raises `ConfigError` for what can't be trusted."""
    try:
        with _opened(folder) as here:
            entries = [entry for entry in map(_NAME.fullmatch, os.listdir(here)) if entry]
            _sweep(here, entries)
            names = [entry[0] for entry in sorted(entries, key=lambda entry: int(entry[2])) if entry[0][0] != "."]
            found = [_read(here, name, folder) for name in names if _runs(name)]
    except FileNotFoundError:
        return ()
    return tuple(each for each in found if each)


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _sweep(here: int, entries: list[re.Match[str]]) -> None:
    for entry in entries:
        if not _runs(entry[0]):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry[0], dir_fd=here)


def _runs(name: str) -> bool:
    entry = _NAME.fullmatch(name)
    return entry is not None and started_at(int(entry[1])) == int(entry[2])


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield the folder, opened: what is checked is what is used. Raises `FileNotFoundError`, or `ConfigError`."""
    try:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(_refusal(folder, f"is no folder of ours ({error.strerror})")) from None
    try:
        if problem := _problem(os.fstat(here)):
            raise ConfigError(_refusal(folder, problem))
        yield here
    finally:
        os.close(here)


def _problem(seen: os.stat_result) -> str:
    if seen.st_uid != os.geteuid():
        return f"belongs to the user with the number {seen.st_uid}"
    mode = stat.S_IMODE(seen.st_mode)
    return f"is open to others (its mode is {mode:04o})" if mode & _OTHERS else ""


def _refusal(path: Path, problem: str) -> str:
    return f"{path} {problem}: remove it, or set XDG_RUNTIME_DIR to a folder that is yours alone"


def _write(here: int, name: str, text: str) -> None:
    """Write a file that nobody finds before it is whole."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(f".{name}", flags, 0o600, dir_fd=here), "w") as file:
        file.write(text)
    os.rename(f".{name}", name, src_dir_fd=here, dst_dir_fd=here)


def _read(here: int, name: str, folder: Path) -> LocalPlatform | None:
    """Return what a file says; None if it has just gone."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(_refusal(folder / name, f"is no file of ours ({error.strerror})")) from None
    with os.fdopen(handle, "rb") as file:
        if problem := _problem(os.fstat(handle)):
            raise ConfigError(_refusal(folder / name, problem))
        return _parsed(file.read(_MAX_NBYTES), folder / name)


def _parsed(text: bytes, path: Path) -> LocalPlatform:
    try:
        values = json.loads(text)
        return LocalPlatform(**{field.name: values[field.name] for field in dataclasses.fields(LocalPlatform)})
    except (ValueError, KeyError, TypeError):
        raise ConfigError(_refusal(path, "is not what this version of Diptych writes")) from None


@dataclass(frozen=True)  # no slots, as its base
class MembersConfig(TrustConfig):
    """Options of commands that ask, or change, the members of a platform."""

    bootstrap: tuple[str, ...] = option(
        (), help=f"bootstrap replicas; dns:///NAME:PORT: all behind a name; none: as here, else {DEFAULT_BOOTSTRAP}"
    )
    platform: str = option("", help=PLATFORM_HELP)


def local_platform(name: str, environ: Mapping[str, str] = os.environ) -> LocalPlatform | None:
    """Return the platform that runs here and is meant. Raises `ConfigError` unless it is clear which."""
    return chosen(running(runtime_folder(environ)), name)


def chosen(platforms: Sequence[LocalPlatform], name: str) -> LocalPlatform | None:
    """Return the one that has this port, or the only one, or None where there is none. Raises `ConfigError`."""
    found = [each for each in platforms if not name or name in each.ports]
    if len(found) > 1:
        raise ConfigError(f"several platforms run here; say which one is meant:{_listing(found)}")
    if name and not found:
        listing = f"; there are:{_listing(platforms)}" if platforms else ", nor any other; `diptych up` starts one"
        raise ConfigError(f"no platform of yours with the port {name} runs here{listing}")
    return found[0] if found else None


def located(config: M, environ: Mapping[str, str] = os.environ) -> M:
    """Return a configuration that says where bootstrap is, and how to be let in. Raises `ConfigError`."""
    if config.bootstrap and config.platform:
        raise ConfigError("--bootstrap and --platform (or their variables) both say where: give one of them")
    if config.bootstrap:
        if config.is_trust_configured(environ):
            return config
        here = [each for each in running(runtime_folder(environ)) if (each.bootstrap,) == config.bootstrap]
        return let_in(config, here[0] if here else None, environ)
    platform = local_platform(config.platform, environ)
    if platform:
        return let_in(dataclasses.replace(config, bootstrap=(platform.bootstrap,)), platform, environ)
    if not config.is_trust_configured(environ):
        raise ConfigError(
            "no platform of yours runs here: start one with `diptych up`, or say where one is with --bootstrap and "
            "how it knows you with --auth-token-file (or DIPTYCH_BOOTSTRAP and DIPTYCH_AUTH_TOKEN_FILE)"
        )
    return dataclasses.replace(config, bootstrap=(DEFAULT_BOOTSTRAP,))


def let_in(config: T, platform: LocalPlatform | None, environ: Mapping[str, str] = os.environ) -> T:
    """Return a configuration with the trust of a platform, unless it has some."""
    if platform is None or config.is_trust_configured(environ):
        return config
    trust = from_namespace(TrustConfig, argparse.Namespace(), platform.trust)
    return dataclasses.replace(
        config, **{field.name: getattr(trust, field.name) for field in dataclasses.fields(TrustConfig)}
    )


def _listing(platforms: Sequence[LocalPlatform]) -> str:
    return "".join(f"\n  --platform {each.name}   {each.model}, bootstrap at {each.bootstrap}" for each in platforms)
