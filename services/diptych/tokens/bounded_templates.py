"""Jinja's sandbox with limits: a template that came with a file must not keep a thread for ever, nor fill the memory.

Rule: every loop, call, filter, join, output, slice and comparison of a template takes from the meter of its rendering.
Where one of them could make much of little, it takes before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, _PassArg

from diptych.tokens.template_costs import AS_GIVEN, FILTER_COSTS, METHOD_COSTS, compares, layout, price, reads, writes
from diptych.tokens.template_meter import ITEM, METER, Meter, Scale, TooMuchWork, size
from diptych.tokens.template_metering import METERING, Metering, text_of

MANY: Final = 256  # what an argument costs
MAX_BITS: Final = 4096  # of a number that is multiplied
MAX_SEPARATORS: Final = 8  # characters, of JSON that is made at once
MAX_WIDTH: Final = 9_999  # of what is padded; and of numbers whose power is taken
_WIDTH: Final = re.compile(r"\d{5}|\*|:[^}]*\{")  # in a layout: above `MAX_WIDTH`, or given elsewhere
_TESTS: Final = (
    *("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge", ">="),
    *("in", "lower", "upper"),
)
_OF_JINJA: Final = ("_loop_vars", "_block_vars")  # arguments of a call that it adds
_OF_BYTES: Final = frozenset({"decode", "hex"})  # all that a template may do with bytes


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of it are rendered with a `Meter` under the name `METER`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["range"] = _metered_range
        del self.globals["lipsum"]  # texts without end
        self.filters["format"] = _narrow(self.filters["format"], _refuse_layout)
        for name in ("batch", "center", "indent", "slice"):
            self.filters[name] = _narrow(self.filters[name], _refuse_widths)
        self.filters = {name: _metered(name, filter_) for name, filter_ in self.filters.items()}
        self.filters |= {"join": _join, "list": _list, "sum": _sum_of, "tojson": _to_json}
        self.filters |= METERING
        tests: dict[str, Any] = self.tests
        tests |= {name: _comparing(tests[name]) for name in _TESTS}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        Metering().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and (not isinstance(obj, bytes) or attr in _OF_BYTES)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = __context.parent[METER]
        meter.charge_steps(1)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _refuse_widths(owner, *args)
            args = tuple([_held(meter, each) for each in args])
            cost = METHOD_COSTS.get(__obj.__name__, reads)
            given = {name: value for name, value in kwargs.items() if name not in _OF_JINJA}
            meter.charge_chars(cost(meter.scale, owner, *args, **given))
        elif args:
            meter.charge_chars(MANY * len(args))
            meter.charge_chars(_call_cost(meter.scale, owner, args))
        made = super().call(__context, __obj, *args, **kwargs)
        return meter.checked(made) if isinstance(made, Namespace) else made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @pass_context
        def metered(context: Context, *args: Any, **kwargs: Any) -> str:
            _refuse_layout(value.__self__)
            meter: Meter = context.parent[METER]
            meter.charge_chars(layout(meter.scale, value.__self__, *args, **kwargs))
            return formatted(*args, **kwargs)

        return metered

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter: Meter = context.parent[METER]
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _refuse_digits(left.bit_length() + right.bit_length())
        elif operator == "*":
            meter.has_lists = True
            meter.charge_chars(size(left) * _factor(right) + size(right) * _factor(left))
        elif operator == "%":
            _refuse_layout(left)
            meter.charge_chars(layout(meter.scale, left, right))
        elif max(abs(left), abs(right)) > MAX_WIDTH:
            raise TooMuchWork(f"powers of numbers above {MAX_WIDTH:,}")
        elif isinstance(left, int) and isinstance(right, int):
            _refuse_digits(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


def _comparing(test: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def compare(context: Context, *args: Any) -> Any:
        meter: Meter = context.parent[METER]
        meter.charge_chars(compares(meter.scale, *args))
        return test(*args)

    return compare


def _call_cost(scale: Scale, owner: object, args: tuple[object, ...]) -> int:
    """Return the cost of a call that is no method of a text: it may copy what it is given, or look for it."""
    if isinstance(owner, list | tuple):
        return sum([compares(scale, each, owner) for each in args])
    if isinstance(owner, dict | LoopContext):
        return sum(map(scale.weigh, args))
    return sum([size(each) for each in args if not isinstance(each, str)])


def _refuse_digits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise TooMuchWork(f"products of more than {MAX_BITS:,} bits")


def _metered(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter so that it takes from the meter: a step, and what it costs."""
    cost, passed = FILTER_COSTS.get(name, reads), _PassArg.from_obj(filter_)

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter: Meter = context.parent[METER]
        meter.charge_steps(1)
        if hasattr(value, "__next__"):
            value = _counted(meter, value, price(args, kwargs))
        meter.charge_chars(cost(meter.scale, value, *args, **kwargs))
        meter.has_lists |= name not in AS_GIVEN
        if passed is None:
            return filter_(value, *args, **kwargs)
        given = {_PassArg.context: context, _PassArg.eval_context: context.eval_ctx}.get(passed, context.environment)
        return filter_(given, value, *args, **kwargs)

    return metered


def _counted(meter: Meter, items: Iterable[Any], each: int = ITEM) -> Iterator[Any]:
    for item in items:
        meter.charge_chars(each)
        yield item


def _held(meter: Meter, value: Any) -> Any:
    """Return what is not there yet as a list, so that its cost can be told."""
    return list(_counted(meter, value)) if hasattr(value, "__next__") else value


@pass_context
def _list(context: Context, value: Iterable[Any]) -> list[Any]:
    meter: Meter = context.parent[METER]
    meter.has_lists = True
    return list(_counted(meter, value))


@pass_context
def _join(context: Context, value: Iterable[Any], d: object = "", attribute: str | int | None = None) -> str:
    meter: Meter = context.parent[METER]
    separator = text_of(meter, d)
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    parts = []
    for item in _counted(meter, value, price((attribute,), {})):
        parts.append(text_of(meter, item))
        meter.charge_chars(len(parts[-1]) + len(separator))
    return separator.join(parts)


@pass_context
def _sum_of(context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    meter: Meter = context.parent[METER]
    if attribute is not None:
        iterable = map(make_attrgetter(context.environment, attribute), iterable)
    for item in _counted(meter, iterable, price((attribute,), {})):
        meter.charge_chars(size(start) + size(item))
        start = start + item
    return start


@pass_context
def _to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes."""
    meter: Meter = context.parent[METER]
    meter.charge_steps(1)
    if indent is None and sum(map(len, separators or ())) <= MAX_SEPARATORS:
        if meter.has_lists:
            meter.charge_chars(_JSON(meter.scale, value))
        text = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        meter.charge_chars(len(text))
        return text
    _refuse_widths("", len(indent) if isinstance(indent, str) else indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return bounded(encoder.iterencode(value), meter)


def bounded(pieces: Iterable[str], meter: Meter) -> str:
    """Return pieces as one text, each of which is paid for."""
    kept = []
    for piece in pieces:
        meter.charge_chars(len(piece))
        kept.append(piece)
    return "".join(kept)


def _narrow(filter_: Callable[..., Any], refuse: Callable[..., None]) -> Callable[..., Any]:
    @wraps(filter_)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        refuse(*args, *kwargs.values())
        return filter_(*args, **kwargs)

    return narrow


def _refuse_layout(layout: object, *args: object) -> None:
    if isinstance(layout, str) and _WIDTH.search(layout):
        raise TooMuchWork(f"padding beyond {MAX_WIDTH:,} characters")


def _refuse_widths(text: object, *args: object) -> None:
    if any(isinstance(each, int) and each > MAX_WIDTH for each in args):
        raise TooMuchWork(f"padding beyond {MAX_WIDTH:,} characters")


_JSON: Final = writes(2)


@pass_context
def _metered_range(context: Context, *args: int) -> range:
    values = safe_range(*args)
    context.parent[METER].charge_steps(len(values))
    return values


def _factor(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0
