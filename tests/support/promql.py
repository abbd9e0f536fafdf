"""Evaluates the part of PromQL that our dashboards and alerts are written in, over scrapes of real pages.

What it does not know it refuses: an expression that came through means what it means to Prometheus. Where `promtool` is
installed a test compares the two. Not here: subqueries, offsets, `without`, `group_left`, and regular expressions other
than those that Go and Python read alike.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")
Labels: TypeAlias = frozenset[tuple[str, str]]
Vector: TypeAlias = dict[Labels, float]
Value: TypeAlias = float | Vector

NAME: Final = "__name__"
_TOKENS: Final = re.compile(
    r'\s*(?:(?P<number>\d+(?:\.\d+)?(?![\w.]))|(?P<range>\[\d+[smh]\])|(?P<text>"[^"]*")'
    r"|(?P<word>[a-zA-Z_:][\w:]*)|(?P<mark>=~|!~|!=|==|>=|<=|[-+*/(){},<>=]))"
)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_LEVELS: Final = (("or",), ("and", "unless"), ("==", "!=", ">", "<", ">=", "<="), ("+", "-"), ("*", "/"))
_AGGREGATES: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "count": lambda values: float(len(values)),
}
_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_MATCH: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "=": lambda value, wanted: value == wanted,
    "!=": lambda value, wanted: value != wanted,
    "=~": lambda value, wanted: re.fullmatch(wanted, value) is not None,
    "!~": lambda value, wanted: re.fullmatch(wanted, value) is None,
}


class Scrape(NamedTuple):
    """All pages at one moment."""

    time_s: float
    samples: Mapping[Labels, float]


def samples_of(page: str, target: Mapping[str, str]) -> Vector:
    """Return the samples of a page; `target`: labels that Prometheus adds. A label of the page's own stays."""
    return {
        frozenset({**target, **sample.labels, NAME: sample.name}.items()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@dataclass(frozen=True)
class Selector:
    """The name of a metric, and what its labels must be."""

    matchers: tuple[tuple[str, str, str], ...]  # label, how, value
    range_s: float = 0.0  # of a range vector

    @property
    def name(self) -> str:
        return next(value for label, how, value in self.matchers if (label, how) == (NAME, "="))

    def matches(self, labels: Labels) -> bool:
        own = dict(labels)
        return all(_MATCH[how](own.get(label, ""), value) for label, how, value in self.matchers)


Node: TypeAlias = "float | Selector | Call | Aggregate | Binary"


@dataclass(frozen=True)
class Call:
    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True)
class Aggregate:
    function: str
    by: tuple[str, ...]
    argument: Node


@dataclass(frozen=True)
class Binary:
    operator: str
    left: Node
    right: Node
    on: tuple[str, ...] | None  # labels that must agree; None: all


def parse(expression: str) -> Node:
    """Raise `ValueError` for what is not known here."""
    parser = _Parser(_tokens(expression))
    node = parser.binary()
    if parser.tokens:
        raise ValueError(f"{parser.tokens[0]!r} is not expected in {expression}")
    return node


def selectors(node: Node) -> Iterator[Selector]:
    """Yield what an expression asks for."""
    match node:
        case Selector():
            yield node
        case Call(arguments=parts):
            yield from itertools.chain.from_iterable(map(selectors, parts))
        case Aggregate(argument=part):
            yield from selectors(part)
        case Binary(left=left, right=right):
            yield from selectors(left)
            yield from selectors(right)


def used_labels(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the labels by which an expression sums or joins, each with the name of a metric that must have it."""
    match node:
        case Call(arguments=parts):
            yield from itertools.chain.from_iterable(map(used_labels, parts))
        case Aggregate(by=by, argument=part):
            yield from itertools.product({each.name for each in selectors(part)}, by)
            yield from used_labels(part)
        case Binary(left=left, right=right, on=on):
            yield from itertools.product({each.name for each in selectors(node)}, on or ())
            yield from used_labels(left)
            yield from used_labels(right)


def kept_labels(node: Node) -> set[str]:
    """Return the labels that every series of the result may have; of a plain selector none are promised."""
    match node:
        case Aggregate(by=by):
            return set(by)
        case Call(arguments=parts):
            return set().union(*map(kept_labels, parts)) - {"le"}
        case Binary(left=left, on=on):
            return kept_labels(left) if on is None else set(on)
        case _:
            return set()


def evaluate(expression: str, scrapes: Sequence[Scrape]) -> Value:
    """Return what an expression is at the moment of the last scrape. A series that is not in a scrape has ended."""
    return _Evaluation(scrapes).of(parse(expression))


def _tokens(expression: str) -> list[str]:
    found, place = [], 0
    while place < len(expression.rstrip()):
        token = _TOKENS.match(expression, place)
        if token is None:
            raise ValueError(f"{expression[place:]!r} can't be read in {expression}")
        found.append(token[0].strip())
        place = token.end()
    return found


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def _next(self) -> str:
        return self.tokens.pop(0) if self.tokens else ""

    def _is_next(self, *wanted: str) -> bool:
        return bool(self.tokens) and self.tokens[0] in wanted

    def _take(self, wanted: str) -> None:
        if (found := self._next()) != wanted:
            raise ValueError(f"{found!r} where {wanted!r} is expected")

    def binary(self, level: int = 0) -> Node:
        if level == len(_LEVELS):
            return self._unary()
        left = self.binary(level + 1)
        while self._is_next(*_LEVELS[level]):
            sign = self._next()
            on = None
            if self._is_next("on"):
                self._next()
                on = self._names()
            left = Binary(sign, left, self.binary(level + 1), on)
        return left

    def _unary(self) -> Node:
        token = self._next()
        if token == "(":
            node = self.binary()
            self._take(")")
            return node
        if re.fullmatch(r"[\d.]+", token):
            return float(token)
        if token in _AGGREGATES:
            return self._aggregate(token)
        if re.fullmatch(r"[a-zA-Z_:][\w:]*", token) is None:
            raise ValueError(f"{token!r} is not expected")
        return self._call(token) if self._is_next("(") else self._selector(token)

    def _aggregate(self, function: str) -> Aggregate:
        by: tuple[str, ...] = ()
        if self._is_next("by"):
            self._next()
            by = self._names()
        self._take("(")
        argument = self.binary()
        self._take(")")
        return Aggregate(function, by, argument)

    def _call(self, function: str) -> Call:
        if function not in _FUNCTIONS:
            raise ValueError(f"the function {function!r} is not known here")
        return Call(function, tuple(self._list(self.binary)))

    def _selector(self, name: str) -> Selector:
        matchers = [(NAME, "=", name)]
        if self._is_next("{"):
            self._next()
            while not self._is_next("}"):
                label, how, value = self._next(), self._next(), self._next()
                if how not in _MATCH or not value.startswith('"'):
                    raise ValueError(f"{label}{how}{value} is no matcher")
                matchers.append((label, how, value.strip('"')))
                if self._is_next(","):
                    self._next()
            self._take("}")
        range_s = 0.0
        if self.tokens and self.tokens[0].startswith("["):
            word = self._next()
            range_s = float(word[1:-2]) * _SECONDS[word[-2]]
        return Selector(tuple(matchers), range_s)

    def _names(self) -> tuple[str, ...]:
        return tuple(self._list(self._next))

    def _list(self, item: Callable[[], T]) -> Iterator[T]:
        self._take("(")
        while not self._is_next(")"):
            yield item()
            if self._is_next(","):
                self._next()
        self._take(")")


class _Evaluation:
    def __init__(self, scrapes: Sequence[Scrape]) -> None:
        self._scrapes = scrapes
        self.now_s = scrapes[-1].time_s

    def of(self, node: Node) -> Value:
        match node:
            case Selector():
                return {labels: value for labels, value in self._scrapes[-1].samples.items() if node.matches(labels)}
            case Call():
                return _FUNCTIONS[node.function](self, *node.arguments)
            case Aggregate():
                return _aggregate(node, self._vector(node.argument))
            case Binary():
                return _binary(node, self.of(node.left), self.of(node.right))
            case _:
                return node

    def _vector(self, node: Node) -> Vector:
        value = self.of(node)
        if isinstance(value, float):
            raise ValueError("a number where series are expected")
        return value

    def _number(self, node: Node) -> float:
        value = self.of(node)
        if not isinstance(value, float):
            raise ValueError("series where a number is expected")
        return value

    def increase(self, node: Node) -> Vector:
        return {labels: value for labels, value in self._increases(node) if value is not None}

    def rate(self, node: Node) -> Vector:
        assert isinstance(node, Selector)
        return {labels: value / node.range_s for labels, value in self.increase(node).items()}

    def _increases(self, node: Node) -> Iterator[tuple[Labels, float | None]]:
        if not (isinstance(node, Selector) and node.range_s):
            raise ValueError("a range is expected")
        begun_s = self.now_s - node.range_s
        within = [scrape for scrape in self._scrapes if scrape.time_s >= begun_s]
        for labels in {labels for scrape in within for labels in scrape.samples if node.matches(labels)}:
            points = [(scrape.time_s, scrape.samples[labels]) for scrape in within if labels in scrape.samples]
            yield _unnamed(labels), _extrapolated(points, begun_s, self.now_s)

    def absent(self, node: Node) -> Vector:
        assert isinstance(node, Selector)
        if self._vector(node):
            return {}
        return {frozenset((label, value) for label, how, value in node.matchers if how == "=" and label != NAME): 1.0}

    def histogram_quantile(self, q: Node, node: Node) -> Vector:
        buckets: dict[Labels, list[tuple[float, float]]] = {}
        for labels, value in self._vector(node).items():
            le = float(dict(labels)["le"])
            buckets.setdefault(frozenset(pair for pair in _unnamed(labels) if pair[0] != "le"), []).append((le, value))
        return {labels: _quantile(self._number(q), sorted(each)) for labels, each in buckets.items()}

    def vector(self, node: Node) -> Vector:
        return {frozenset(): self._number(node)}


_FUNCTIONS: Final[Mapping[str, Callable[..., Value]]] = {
    "rate": _Evaluation.rate,
    "increase": _Evaluation.increase,
    "absent": _Evaluation.absent,
    "histogram_quantile": _Evaluation.histogram_quantile,
    "vector": _Evaluation.vector,
    "time": lambda evaluation: evaluation.now_s,
}


def _unnamed(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != NAME)


def _only(labels: Labels, names: Iterable[str]) -> Labels:
    """An empty label is none."""
    wanted = set(names)
    return frozenset((label, value) for label, value in labels if label in wanted and value)


def _aggregate(node: Aggregate, vector: Vector) -> Vector:
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(_only(labels, node.by), []).append(value)
    return {labels: float(_AGGREGATES[node.function](values)) for labels, values in groups.items()}


def _extrapolated(points: Sequence[tuple[float, float]], begun_s: float, now_s: float) -> float | None:
    """Return by how much a counter grew in the range, as Prometheus guesses it from the samples in it."""
    if len(points) < 2:
        return None
    resets = sum(before for (_, before), (_, after) in itertools.pairwise(points) if after < before)
    grown = points[-1][1] - points[0][1] + resets
    sampled_s = points[-1][0] - points[0][0]
    mean_s = sampled_s / (len(points) - 1)
    to_start_s, to_end_s = points[0][0] - begun_s, now_s - points[-1][0]
    if grown > 0 and points[0][1] >= 0:
        to_start_s = min(to_start_s, sampled_s * points[0][1] / grown)  # it was not below zero
    for gap_s in (to_start_s, to_end_s):
        sampled_s += gap_s if gap_s < 1.1 * mean_s else mean_s / 2
    return grown * sampled_s / (points[-1][0] - points[0][0])


def _quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float:
    """`buckets`: (upper bound, cumulative count)."""
    total = buckets[-1][1]
    if len(buckets) < 2 or not math.isinf(buckets[-1][0]) or not total:
        return math.nan
    counts = list(itertools.accumulate((count for _, count in buckets), max))
    place = next(index for index, count in enumerate(counts) if count >= q * total)
    if place == len(buckets) - 1:
        return buckets[-2][0]
    begun, before = (buckets[place - 1][0], counts[place - 1]) if place else (0.0, 0.0)
    return begun + (buckets[place][0] - begun) * (q * total - before) / (counts[place] - before)


def _binary(node: Binary, left: Value, right: Value) -> Value:
    if node.operator in ("and", "or", "unless"):
        return _set_operation(node, left, right)
    if isinstance(left, float) and isinstance(right, float):
        return _computed(node.operator, left, right)
    if isinstance(left, float):
        assert isinstance(right, dict)
        pairs = [(labels, left, value, value) for labels, value in right.items()]
    elif isinstance(right, float):
        pairs = [(labels, value, right, value) for labels, value in left.items()]
    else:
        pairs = [(labels, one, other, one) for labels, one, other in _joined(node, left, right)]
    if node.operator in _COMPARE:
        return {labels: kept for labels, one, other, kept in pairs if _COMPARE[node.operator](one, other)}
    return {_unnamed(labels): _computed(node.operator, one, other) for labels, one, other, _ in pairs}


def _computed(sign: str, left: float, right: float) -> float:
    if sign == "/":
        return left / right if right else (math.nan if not left else math.copysign(math.inf, left))
    return float({"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](left, right))


def _key(node: Binary, labels: Labels) -> Labels:
    return _unnamed(labels) if node.on is None else _only(labels, node.on)


def _joined(node: Binary, left: Vector, right: Vector) -> Iterator[tuple[Labels, float, float]]:
    """Yield the pairs of series, one to one."""
    others: dict[Labels, float] = {}
    for labels, value in right.items():
        if _key(node, labels) in others:
            raise ValueError(f"several series on the right side have {dict(_key(node, labels))}")
        others[_key(node, labels)] = value
    met: set[Labels] = set()
    for labels, value in left.items():
        key = _key(node, labels)
        if key not in others:
            continue
        if key in met:
            raise ValueError(f"several series on the left side have {dict(key)}")
        met.add(key)
        yield (labels if node.operator in _COMPARE and node.on is None else key), value, others[key]


def _set_operation(node: Binary, left: Value, right: Value) -> Vector:
    if isinstance(left, float) or isinstance(right, float):
        raise ValueError(f"{node.operator} is for series")
    ours, theirs = ({_key(node, labels) for labels in side} for side in (left, right))
    if node.operator == "or":
        return {**left, **{labels: value for labels, value in right.items() if _key(node, labels) not in ours}}
    wanted = node.operator == "and"
    return {labels: value for labels, value in left.items() if (_key(node, labels) in theirs) is wanted}
