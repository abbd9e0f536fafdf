"""Jinja's sandbox with limits: a template that came with a file must not keep a thread for ever, nor fill the memory.

Counted are steps (turns of loops, calls, items of ranges) and the characters that joining makes. No clock: a template
that passes once always passes. Rule: every loop, call and join of a template takes from the meter of its rendering.

What counts loops and joins stands in a compiled template as filters do, which are called directly: the calls that a
template writes go through the checks of the sandbox, which cost several times as much as what is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 1_000_000
MAX_CHARS: Final = 512 << 20  # of all that is joined; a conversation that grows piece by piece is copied at each
MAX_WIDTH: Final = 9_999  # of what is padded; and of numbers whose power is taken
_WIDTH: Final = re.compile(r"\d{5}|\*|:[^}]*\{")  # in a layout: above `MAX_WIDTH`, or given elsewhere
METER: Final = "the meter"  # in a context: no template can write such a name
_TURN, _SUM, _JOINED = "a turn", "a sum", "what is joined"  # filters: nor these


class TooMuchWork(Exception):
    """A rendering took more than it may. The message says of what."""


class Meter:
    """What one rendering may still do."""

    __slots__ = ("_chars", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS

    def take_steps(self, count: int) -> None:
        self._steps -= count
        if self._steps < 0:
            raise TooMuchWork(f"more than {MAX_STEPS:,} steps")

    def take_chars(self, count: int) -> None:
        self._chars -= count
        if self._chars < 0:
            raise TooMuchWork(f"more than {MAX_CHARS:,} characters")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of it are rendered with a `Meter` under the name `METER`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["range"] = _metered_range
        self.filters |= {_TURN: _turn, _SUM: _sum, _JOINED: _joined}
        self.filters["format"] = _narrow(self.filters["format"], _refuse_layout)
        for name in ("center", "indent"):
            self.filters[name] = _narrow(self.filters[name], _refuse_widths)
        del self.globals["lipsum"]  # texts without end

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metering().visit(tree)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context.parent[METER].take_steps(1)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _refuse_widths(owner, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        return formatted and _narrow(formatted, partial(_refuse_layout, value.__self__))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            context.parent[METER].take_chars(_length(left) * _factor(right) + _length(right) * _factor(left))
        elif operator == "%":
            _refuse_layout(left)
        elif max(abs(left), abs(right)) > MAX_WIDTH:
            raise TooMuchWork(f"powers of numbers above {MAX_WIDTH:,}")
        return super().call_binop(context, operator, left, right)


class _Metering(NodeTransformer):
    """Puts `_turn`, `_sum` and `_joined` into a template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        turn = _filter(_TURN, [nodes.Const(True)], node.lineno)
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        else:  # it is asked of items that the body never sees, too
            node.test = nodes.And(turn, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(_JOINED, node.nodes, node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:
        """All terms of a sum at once."""
        terms, left = [node.right], node.left
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        return _filter(_SUM, [self.visit(term) for term in (left, *reversed(terms))], node.lineno)


def _filter(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Filter:
    first, *others = arguments
    return nodes.Filter(first, name, others, [], None, None, lineno=lineno)


@pass_context
def _turn(context: Context, value: bool) -> bool:
    """Note a turn of a loop."""
    context.parent[METER].take_steps(1)
    return value


@pass_context
def _sum(context: Context, *terms: Any) -> Any:
    """Return what `+` makes of terms, from left to right; of texts, which most of them are, at once."""
    meter: Meter = context.parent[METER]
    if {*map(type, terms)} == {str}:
        meter.take_chars(sum(map(len, terms)))
        return "".join(terms)
    total, *others = terms
    for term in others:
        meter.take_chars(_length(total) + _length(term))
        total = total + term
    return total


@pass_context
def _joined(context: Context, *parts: object) -> str:
    """Return what `~` makes."""
    joined = "".join(map(str, parts))
    context.parent[METER].take_chars(len(joined))
    return joined


def bounded(pieces: Iterator[str], meter: Meter) -> str:
    """Return the pieces of an output as one text."""
    kept = []
    for piece in pieces:
        meter.take_chars(len(piece))
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


@pass_context
def _metered_range(context: Context, *args: int) -> range:
    values = safe_range(*args)
    context.parent[METER].take_steps(len(values))
    return values


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _factor(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0
