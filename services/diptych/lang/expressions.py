"""The expressions of a program, as values: text, outputs, choices, messages, images. `+` puts them in a row."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.generation.grammar import Grammar, GrammarKind
from diptych.generation.sampling_params import SamplingParams
from diptych.lang.choices import TOKEN_LENGTH_NORMALIZED, Method

IMAGE_KINDS: Final = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}  # by how files begin
MAX_TOKENS: Final = 128  # of an output, unless it is told
LISTS: Final = ("stop", "stop_regex", "stop_token_ids")
SAMPLING: Final = frozenset(  # what is told of an output beside its grammar
    {"max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "logit_bias", *LISTS}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
)


class Expression:
    """What may be appended to a state."""

    def __add__(self, other: Expression | str) -> Sequence_:
        return Sequence_((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: str) -> Sequence_:
        return Sequence_((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True, slots=True)
class Text(Expression):
    """Text that is given."""

    text: str


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """An output of the model. Its text is the variable `name`, if it has one."""

    name: str
    params: SamplingParams
    said: frozenset[str] = frozenset()  # the parameters that it names: others may be those of a run


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """The likeliest of several texts, by `method`. It is the variable `name`."""

    name: str
    choices: tuple[str, ...]
    method: Method


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    """A message of a chat begins."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    """It ends."""

    role: str


@dataclass(frozen=True, slots=True)
class Image(Expression):
    """An image in a message."""

    url: str  # where it is; or a data URL with its file


@dataclass(frozen=True, slots=True)
class Argument(Expression):
    """A value that is not known while a program is traced: an argument, or what the model will have made."""

    name: str

    def __format__(self, spec: str) -> str:
        raise UnknownValue(self.name)

    def __str__(self) -> str:
        raise UnknownValue(self.name)

    def __bool__(self) -> bool:
        raise UnknownValue(self.name)

    def __len__(self) -> int:
        raise UnknownValue(self.name)

    def __iter__(self) -> Iterator[Any]:
        raise UnknownValue(self.name)

    def __getitem__(self, key: object) -> Any:
        raise UnknownValue(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownValue(self.name)


class UnknownValue(DiptychError):
    """A traced program did more with a value than to append it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has no value while the program is traced")


@dataclass(frozen=True, slots=True)
class Sequence_(Expression):
    """Expressions in a row, none of them a sequence."""

    parts: tuple[Expression, ...]


def parts_of(what: Expression | str) -> tuple[Expression, ...]:
    """Return the expressions that `what` consists of. Raises `TypeError` for what is no expression."""
    if isinstance(what, Sequence_):
        return what.parts
    if isinstance(what, Expression):
        return (what,)
    if isinstance(what, str):
        return (Text(what),) if what else ()
    raise TypeError(
        f"a program consists of text and of what gen, select and roles return, not of {type(what).__name__}"
    )


def named(parts: Sequence[Expression]) -> Iterator[str]:
    """Yield the variables that expressions set."""
    for part in parts:
        if isinstance(part, Gen | Select) and part.name:
            yield part.name


def gen(
    name: str = "",
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    choices: Sequence[str] | None = None,
    choices_method: Method = TOKEN_LENGTH_NORMALIZED,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    ebnf: str | None = None,
    **params: Any,
) -> Expression:
    """Return an output of the model, in at most `max_tokens` tokens (128), that ends before any of `stop`.

    It matches `regex`, `json_schema` or `ebnf`, if one is given. `params` are other fields of `SamplingParams`
    (`temperature`, `top_p`, `seed`, ...); without a seed it is drawn anew each time. With `choices` it is a `select`.
    Raises `InvalidRequest` for values out of range, and for parameters that there are none of.
    """
    if choices is not None:
        return select(name, choices, choices_method=choices_method)
    given = {**params, "max_tokens": max_tokens, "stop": stop}
    said = sampling({key: value for key, value in given.items() if value is not None})
    chosen = SamplingParams(**{"max_tokens": MAX_TOKENS, **said}, grammar=_grammar(regex, json_schema, ebnf))
    chosen.validate()
    return Gen(name, chosen, frozenset(said))


def sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters as `SamplingParams` has them. Raises `InvalidRequest` for one that there is not."""
    if unknown := given.keys() - SAMPLING:
        raise InvalidRequest(
            f"there is no {min(unknown)!r}: it may be {', '.join(sorted(SAMPLING))}", param=min(unknown)
        )
    texts = {key: (value,) if isinstance(value, str) else tuple(value) for key, value in given.items() if key in LISTS}
    return {**given, **texts}


def select(name: str, choices: Sequence[str], *, choices_method: Method = TOKEN_LENGTH_NORMALIZED) -> Expression:
    """Return that one of `choices` which the model thinks likeliest behind what is before it."""
    if not choices or not all(choices):
        raise InvalidRequest("choices must be texts, at least one, and none of them empty", param="choices")
    return Select(name, tuple(choices), choices_method)


def image(source: str | bytes | Path) -> Expression:
    """Return an image for a message of a chat: a path, an address, or the bytes of a file.

    Raises `InvalidRequest` for a file that can't be read, or is no PNG, JPEG, WebP or GIF.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return Image(source)
    try:
        file = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the image can't be read: {error}", param="image") from None
    kind = next((kind for begin, kind in IMAGE_KINDS.items() if file.startswith(begin)), None)
    if kind is None:
        raise InvalidRequest("an image is a PNG, JPEG, WebP or GIF", param="image")
    return Image(f"data:image/{kind};base64,{base64.b64encode(file).decode()}")


def _grammar(regex: str | None, schema: str | Mapping[str, Any] | None, ebnf: str | None) -> Grammar | None:
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    kinds = {GrammarKind.REGEX: regex, GrammarKind.JSON_SCHEMA: text, GrammarKind.EBNF: ebnf}
    given = [Grammar(kind, text) for kind, text in kinds.items() if text is not None]
    if len(given) > 1:
        raise InvalidRequest("give only one of regex, json_schema and ebnf", param="regex")
    return given[0] if given else None


def _message(role: str, content: Expression | str) -> Sequence_:
    return Sequence_((RoleBegin(role), *parts_of(content), RoleEnd(role)))


def system(content: Expression | str) -> Expression:
    """Return a message of role `system`."""
    return _message("system", content)


def user(content: Expression | str) -> Expression:
    """Return a message of role `user`."""
    return _message("user", content)


def assistant(content: Expression | str) -> Expression:
    """Return a message of role `assistant`."""
    return _message("assistant", content)


def system_begin() -> Expression:
    return RoleBegin("system")


def system_end() -> Expression:
    return RoleEnd("system")


def user_begin() -> Expression:
    return RoleBegin("user")


def user_end() -> Expression:
    return RoleEnd("user")


def assistant_begin() -> Expression:
    return RoleBegin("assistant")


def assistant_end() -> Expression:
    return RoleEnd("assistant")


def with_defaults(part: Expression, defaults: Mapping[str, Any]) -> Expression:
    """Return it with the sampling parameters of a run, where it says nothing of its own."""
    if not defaults or not isinstance(part, Gen):
        return part
    unsaid = {name: value for name, value in defaults.items() if name not in part.said}
    return Gen(part.name, replace(part.params, **unsaid), part.said | unsaid.keys())


class Appendable(Protocol):
    """What a program writes into, whether it is run or traced."""

    def __iadd__(self, what: Expression | str) -> Self: ...


@contextmanager
def message_of(state: Appendable, role: str) -> Iterator[None]:
    """Within the context, all that is appended belongs to one message."""
    state += RoleBegin(role)
    yield
    state += RoleEnd(role)
