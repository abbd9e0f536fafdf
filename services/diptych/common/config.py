"""Turns a frozen dataclass into flags and environment variables of the same names, and back into its value.

    @dataclass(frozen=True, slots=True)
    class RouterConfig:
        bootstrap: tuple[str, ...] = option(REQUIRED, help="addresses of the bootstrap servers")
        http_port: int = option(8000, help="port of the HTTP API; 0 picks a free one")

`--http-port 9` beats `DIPTYCH_HTTP_PORT=8`, which beats the default. An empty variable counts as absent. Fields may be
str, int, float, bool, Path, an Enum, a Literal, `X | None` or `tuple[X, ...]` (comma separated, and repeatable as a
flag). A str whose values are the names of a registry has them as its `choices`. An int called port, or `..._port`, is
one. A wrong value is a `ConfigError` that names the flag or the variable it came from; `parse` prints it and exits 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar

from diptych.common.errors import ConfigError

T = TypeVar("T")

MAX_PORT: Final = 65535
_METADATA_KEY: Final = "diptych.option"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


class _Required(enum.Enum):
    REQUIRED = "required"


REQUIRED: Final = _Required.REQUIRED  # as a default: the option must be given


class _Option(NamedTuple):
    """What is said of an option beside its field."""

    help: str
    group: str
    choices: tuple[str, ...] = ()
    is_positional: bool = False


def option(default: object, *, help: str, group: str = "options", choices: Iterable[str] = ()) -> Any:
    """Declare a dataclass field that is also a flag and a `DIPTYCH_*` variable. `group` is its heading in `--help`."""
    return _field(default, _Option(help, group, tuple(choices)))


def argument(default: object, *, help: str) -> Any:
    """Declare a dataclass field that is given by its place on the command line, not by a flag or a variable."""
    return _field(default, _Option(help, "arguments", is_positional=True))


def _field(default: object, declared: _Option) -> Any:
    given = dataclasses.MISSING if default is REQUIRED else default
    return dataclasses.field(default=given, kw_only=True, metadata={_METADATA_KEY: declared})


def parse(config_class: type[T], argv: Sequence[str], *, prog: str) -> T:
    """Return the configuration that `argv` and the environment ask for; exit 2 with the reason if there is none.

    A `config_class` may say by `advice(words)` what to do with words that are none of its options.
    """
    parser = new_parser(prog, description=config_class.__doc__)
    add_options(parser, config_class)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        advice = getattr(config_class, "advice", None)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{advice(unknown) if advice else ''}")
    try:
        return from_namespace(config_class, namespace)
    except ConfigError as error:
        exit_with_usage(parser, error)


def new_parser(prog: str, *, description: str | None = None) -> argparse.ArgumentParser:
    """Return an empty parser in the house style: no abbreviations, wide help."""
    return argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help)


def add_options(parser: argparse.ArgumentParser, config_class: type[Any]) -> None:
    """Add a flag for each option of `config_class`. Several classes may share one parser."""
    groups = {group.title: group for group in parser._action_groups}
    for field, declared, annotation in _options(config_class):
        if declared.is_positional:
            parser.add_argument(field.name, nargs="?", help=declared.help)
            continue
        if declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        _add_flag(groups[declared.group], field, declared, annotation)


def from_namespace(config_class: type[T], namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> T:
    """Build and `validate()` the configuration. Raises `ConfigError` for a wrong or missing value."""
    values: dict[str, object] = {}
    for field, declared, annotation in _options(config_class):
        flag = field.name.upper() if declared.is_positional else flag_name(field.name)
        variable = env_name(field.name)
        given = getattr(namespace, field.name, None)
        if given is not None:
            values[field.name] = _value(field.name, given, annotation, source=flag)
        elif environ.get(variable) and not declared.is_positional:
            values[field.name] = _value(field.name, environ[variable], annotation, source=variable)
        elif field.default is dataclasses.MISSING and declared.is_positional:
            raise ConfigError(f"{flag} is missing: {declared.help}")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{flag} is required: give {flag} or set {variable}")
    config = config_class(**values)
    validate = getattr(config, "validate", None)
    if validate is not None:
        validate()
    return config


def to_flags(config: object) -> list[str]:
    """Return the flags that ask for this configuration, whatever the environment says; what is None is left out."""
    given = {field.name: getattr(config, field.name) for field, *_ in _options(type(config))}
    return [_to_flag(name, value) for name, value in given.items() if value is not None]


def _to_flag(name: str, value: object) -> str:
    match value:
        case bool():
            return flag_name(name if value else f"no_{name}")
        case tuple():
            return f"{flag_name(name)}={','.join(map(str, value))}"
        case enum.Enum():
            return f"{flag_name(name)}={value.value}"
        case _:
            return f"{flag_name(name)}={value}"


def exit_with_usage(parser: argparse.ArgumentParser, error: ConfigError) -> NoReturn:
    """Print what is wrong and where to read more; exit with status 2, as for an unknown flag."""
    print(f"{parser.prog}: {error}\nSee {parser.prog} --help.", file=sys.stderr)
    raise SystemExit(2)


def flag_name(field_name: str) -> str:
    """Return `--http-port` for `http_port`."""
    return "--" + field_name.replace("_", "-")


def env_name(field_name: str) -> str:
    """Return `DIPTYCH_HTTP_PORT` for `http_port`."""
    return "DIPTYCH_" + field_name.upper()


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def described(config_class: type[Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, annotation and help of each option: what a schema of them is made of."""
    return ((field.name, _inner(annotation), declared.help) for field, declared, annotation in _options(config_class))


def _options(config_class: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], _Option, Any]]:
    """Yield the options with their annotations: that of one with choices is the Literal of these."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if _METADATA_KEY in field.metadata:
            declared = field.metadata[_METADATA_KEY]
            yield field, declared, Literal.__getitem__(declared.choices) if declared.choices else hints[field.name]


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], declared: _Option, annotation: object
) -> None:
    flag = flag_name(field.name)
    default = "required" if field.default is dataclasses.MISSING else f"default {_shown(field.default)}"
    text = f"{declared.help} [{env_name(field.name)}; {default}]".replace("%", "%%")
    if _inner(annotation) is bool:
        group.add_argument(flag, dest=field.name, default=None, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(
            flag, dest=field.name, default=None, action="append", help=text, metavar=_metavar(annotation)
        )


def _shown(default: object) -> str:
    match default:
        case None | "" | ():
            return "none"
        case tuple():
            return ",".join(_shown(item) for item in default)
        case bool():
            return "on" if default else "off"
        case enum.Enum():
            return str(default.value)
        case _:
            return str(default)


def _inner(annotation: object) -> Any:
    """Return X of `X | None`, else the annotation itself."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (inner,) = (item for item in typing.get_args(annotation) if item is not types.NoneType)
        return inner
    return annotation


def _metavar(annotation: object) -> str:
    kind = _inner(annotation)
    if typing.get_origin(kind) is tuple:
        return f"{_metavar(typing.get_args(kind)[0])},..."
    choices = _choices(kind)
    if choices:
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _choices(kind: Any) -> Mapping[str, object]:
    if typing.get_origin(kind) is Literal:
        return {str(item): item for item in typing.get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {str(item.value): item for item in kind}
    return {}


def _value(name: str, given: object, annotation: object, *, source: str) -> object:
    value = _convert(given, annotation, source=source)
    if isinstance(value, int) and f"_{name}".endswith("_port") and not 0 <= value <= MAX_PORT:
        raise ConfigError(f"{source} must be between 0 and {MAX_PORT}, not {value}")
    return value


def _convert(given: object, annotation: object, *, source: str) -> object:
    """Turn what was given (a flag's list of strings or bool, or a variable's string) into the field's type."""
    if isinstance(given, bool):
        return given
    texts = [str(text) for text in given] if isinstance(given, list) else [str(given)]
    kind = _inner(annotation)
    if typing.get_origin(kind) is tuple:
        items = [item.strip() for text in texts for item in text.split(",")]
        return tuple(_convert_one(item, typing.get_args(kind)[0], source) for item in items if item)
    return _convert_one(texts[-1], kind, source)


def _convert_one(text: str, kind: Any, source: str) -> object:
    choices = _choices(kind)
    if choices:
        if text not in choices:
            raise ConfigError(f"{source} must be one of {', '.join(choices)}, not {text!r}")
        return choices[text]
    convert, wanted = _CONVERTERS[kind]
    try:
        return convert(text)
    except ValueError:
        raise ConfigError(f"{source} must be {wanted}, not {text!r}") from None


def _float(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError(text)
    return value


def _bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError(text)
    return lowered in _TRUE


_CONVERTERS: Final[Mapping[type, tuple[Callable[[str], object], str]]] = {
    str: (str, "text"),
    int: (int, "a whole number"),
    float: (_float, "a number"),
    bool: (_bool, "one of 1, 0, true, false, yes, no, on, off"),
    Path: (Path, "a path"),
}
