"""Puts what counts into a template: it stands there as filters do.

Filters are called directly. The calls that a template writes go through the checks of the sandbox, which cost several
times as much as what is counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from diptych.tokens.template_costs import compares
from diptych.tokens.template_meter import METER, Meter, size

_TURN, _SUM, _JOINED = "a turn", "a sum", "what is joined"  # filters: no template can write such names
_COMPARED, _CUT, _MADE, _KEY = "what is compared", "what is cut out", "what is made", "a key"  # likewise
_SHOWN = "what is shown"
_CHARS_A_STEP: Final = 512  # of the body of a loop or macro
_NODE_CHARS: Final = 8  # as many as a node of it takes time
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class Metering(NodeTransformer):
    """Puts what counts into a template."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        weight = _weight(node)
        self.generic_visit(node)
        turn = _filter(_TURN, [nodes.Const(True), nodes.Const(weight)], node.lineno)
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        else:  # it is asked of items that the body never sees, too
            node.test = nodes.And(turn, node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        turn = _filter(_TURN, [nodes.Const(True), nodes.Const(_weight(node))], node.lineno)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """What the template says itself is counted with the body that says it."""
        self.generic_visit(node)
        if all(isinstance(part, nodes.TemplateData | nodes.Const) for part in node.nodes):
            return node
        parts = [nodes.Const(part.data) if isinstance(part, nodes.TemplateData) else part for part in node.nodes]
        kind = _JOINED if len(parts) > 1 else _SHOWN
        return nodes.Output([_filter(kind, parts, node.lineno)], lineno=node.lineno)

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

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        """What is compared with a short text of the template costs nothing to speak of."""
        self.generic_visit(node)
        if all(_is_cheap(node.expr, operand) for operand in node.ops):
            return node
        others = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _filter(_COMPARED, [node.expr, *others], node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filter(_CUT, [node], node.lineno)
        if not isinstance(node.arg, nodes.Const | nodes.Sub):
            node.arg = _filter(_KEY, [node.arg], node.lineno)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return self._made(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self._made(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return self._made(node, [part for pair in node.items for part in (pair.key, pair.value)])

    def _made(self, node: nodes.Expr, parts: list[nodes.Expr]) -> nodes.Expr:
        self.generic_visit(node)
        return node if all(isinstance(part, nodes.Const) for part in parts) else _filter(_MADE, [node], node.lineno)


def _is_cheap(left: nodes.Expr, operand: nodes.Operand) -> bool:
    right = operand.expr
    if operand.op in ("in", "notin"):
        return isinstance(right, nodes.List | nodes.Tuple) and all(
            isinstance(each, nodes.Const) for each in right.items
        )
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


def _weight(node: nodes.Node) -> int:
    """Return how many steps its body is, once through."""
    num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    num_chars += sum(len(str(const.value)) for const in node.find_all(nodes.Const))
    return 1 + (_NODE_CHARS * sum(1 for _ in node.find_all(nodes.Node)) + num_chars) // _CHARS_A_STEP


def _filter(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Filter:
    first, *others = arguments
    return nodes.Filter(first, name, others, [], None, None, lineno=lineno)


@pass_context
def _turn(context: Context, value: bool, weight: int) -> bool:
    """Note a turn of a loop, or the call of a macro."""
    context.parent[METER].charge_steps(weight)
    return value


@pass_context
def _sum(context: Context, *terms: Any) -> Any:
    """Return what `+` makes of terms, from left to right; of texts, which most of them are, at once."""
    meter: Meter = context.parent[METER]
    if {*map(type, terms)} == {str}:
        meter.charge_chars(sum(map(len, terms)))
        return "".join(terms)
    meter.has_lists = True  # as far as anybody knows
    total, *others = terms
    for term in others:
        meter.charge_chars(size(total) + size(term))
        total = total + term
    return total


@pass_context
def _joined(context: Context, *parts: object) -> str:
    """Return what `~` makes, or an output of several parts."""
    meter: Meter = context.parent[METER]
    texts = [part if type(part) is str else text_of(meter, part) for part in parts]
    meter.charge_chars(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _shown(context: Context, value: object) -> str:
    meter: Meter = context.parent[METER]
    text = value if type(value) is str else text_of(meter, value)
    meter.charge_chars(len(text))
    return text


def text_of(meter: Meter, value: object) -> str:
    """Return a value as text; it was paid for if it is one."""
    if not isinstance(value, str):
        meter.charge_chars(meter.scale.weigh(value))
    return str(value)


@pass_context
def _cut(context: Context, part: Any) -> Any:
    context.parent[METER].charge_chars(size(part))
    return part


@pass_context
def _made(context: Context, value: Any) -> Any:
    return context.parent[METER].checked(value)


@pass_context
def _key(context: Context, key: Any) -> Any:
    meter: Meter = context.parent[METER]
    meter.charge_chars(meter.scale.weigh(key))
    return key


@pass_context
def _compared(context: Context, left: Any, *others: Any) -> Any:
    """Return what comparisons one after the other say, of a value, and operators and values in turn."""
    meter: Meter = context.parent[METER]
    says: Any = True
    for name, right in zip(others[::2], others[1::2], strict=True):
        meter.charge_chars(compares(meter.scale, left, right))
        says = _COMPARISONS[name](left, right)
        if not says:
            return says
        left = right
    return says


METERING: Final[Mapping[str, Callable[..., Any]]] = {  # the filters that it puts there
    _TURN: _turn,
    _SUM: _sum,
    _JOINED: _joined,
    _SHOWN: _shown,
    _COMPARED: _compared,
    _CUT: _cut,
    _MADE: _made,
    _KEY: _key,
}
