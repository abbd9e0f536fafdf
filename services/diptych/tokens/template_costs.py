"""What filters, methods and comparisons of a template cost, in characters, told before they begin. Pure.

A cost is a bound on what is read and made. An item of a list counts as `ITEM`, and what is slow as several times
as much. Functions of costs take what the filter or method takes, after the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

from diptych.tokens.template_meter import ITEM, Scale, size

_PERIOD: Final = 100  # a longer needle is found in linear time
_BREAKS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
Cost = Callable[..., int]


def reads(scale: Scale, value: object, *args: object, **kwargs: object) -> int:
    """The cost of what goes once through what it is given; each item may be looked at with all that comes with it."""
    num_items = len(value) if isinstance(value, list | tuple | dict) else 0
    return size(value) + sum(map(size, _all(args, kwargs))) + num_items * price(args, kwargs)


def price(args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """The cost of each item, for a filter with these arguments."""
    return ITEM + sum([len(each) for each in _all(args, kwargs) if isinstance(each, str)])


def free(scale: Scale, *args: object, **kwargs: object) -> int:
    return 0


def writes(factor: int) -> Cost:
    """Return the cost of what writes its arguments, at a length of up to so many times theirs or as slowly as that."""

    def cost(scale: Scale, *args: object, **kwargs: object) -> int:
        return factor * sum(map(scale.weigh, _all(args, kwargs)))

    return cost


def _all(args: Sequence[object], kwargs: Mapping[str, object]) -> Iterable[object]:
    return chain(args, kwargs.values())


def _orders(scale: Scale, value: object, *args: object, **kwargs: object) -> int:
    if not isinstance(value, str | list | tuple | dict):
        return 0
    return scale.weigh(value) * len(value).bit_length() + reads(scale, value, *args, **kwargs)


def finds(text: object, part: object, *others: object) -> int:
    """What looking for a part costs."""
    if not isinstance(text, str) or not isinstance(part, str):
        return size(text)
    return len(text) * (1 + min(len(part), _PERIOD) // 8)


def _finds(scale: Scale, text: str, *args: object) -> int:
    return finds(text, *args) if args else len(text)


def _strip(scale: Scale, text: object, chars: object = None) -> int:
    return size(text) * (1 + size(chars) // 8)


def _finds_backwards(scale: Scale, text: str, *args: object) -> int:
    """Backwards nothing is found in linear time."""
    return len(text) * max(1, size(args[0]) if args else 1)


def _count(text: str, part: object) -> int:
    return text.count(part) if isinstance(part, str) else len(text)


def _replace(scale: Scale, text: object, old: object, new: object, count: object = None) -> int:
    if isinstance(text, str):
        return finds(text, old) + _count(text, old) * scale.weigh(new)
    return (scale.weigh(text) + 1) * (scale.weigh(new) + 1)


def _split(scale: Scale, text: str, sep: object = None, maxsplit: object = -1) -> int:
    if isinstance(maxsplit, int) and maxsplit >= 0:
        num_parts = min(maxsplit, len(text))
    else:
        num_parts = _count(text, sep) if sep is not None else len(text) // 2
    return finds(text, sep) + ITEM * num_parts


def _split_backwards(scale: Scale, text: str, sep: object = None, maxsplit: object = -1) -> int:
    return _split(scale, text, sep, maxsplit) + len(text) * size(sep)


def _lines(text: str) -> int:
    return 1 + sum(map(text.count, _BREAKS))


def _split_lines(scale: Scale, text: str, *args: object, **kwargs: object) -> int:
    return len(text) + ITEM * _lines(text)


def _join(scale: Scale, sep: str, items: object) -> int:
    return (scale.weigh(items) + ITEM + len(sep) * len(items)) if isinstance(items, list | tuple | dict) else 0


def _translate(scale: Scale, text: str, table: object) -> int:
    longest = max(map(size, table.values()), default=1) if isinstance(table, dict) else 1
    return len(text) * (1 + longest)


def _expand_tabs(scale: Scale, text: str, tabsize: object = 8) -> int:
    return len(text) + text.count("\t") * (tabsize if isinstance(tabsize, int) else 8)


def layout(scale: Scale, text: object, *args: object, **kwargs: object) -> int:
    """What filling in a layout costs: each field may take all arguments."""
    fields = text.count("%") + text.count("{") if isinstance(text, str) else 1
    return scale.weigh(text) + fields * sum(map(scale.weigh, _all(args, kwargs)))


def compares(scale: Scale, left: object, right: object = None) -> int:
    """Return the cost of equality, of order, or of looking for the left one in the right one."""
    if isinstance(left, str) and isinstance(right, str):
        return finds(right, left)
    if isinstance(right, list | tuple):
        return (
            scale.weigh(right) if isinstance(left, list | tuple | dict) else size(right) + size(left) * len(right) // 8
        )
    return scale.weigh(left)


def _indent(scale: Scale, text: object, width: object = 4, *args: object, **kwargs: object) -> int:
    width_len = width if isinstance(width, int) else scale.weigh(width)
    return scale.weigh(text) + (_lines(text) if isinstance(text, str) else 1) * width_len


def _wrap(scale: Scale, text: object, *args: object, **kwargs: object) -> int:
    return (scale.weigh(text) + 1) * (ITEM + sum(map(scale.weigh, _all(args, kwargs))))


def _strip_tags(scale: Scale, text: object, *args: object) -> int:
    """Each tag is cut out of the whole text."""
    return (scale.weigh(text) + 1) * (text.count("<") + 1 if isinstance(text, str) else 1)


AS_GIVEN: Final = frozenset(  # filters that make no lists
    {"attr", "capitalize", "count", "d", "default", "e", "escape", "first", "float", "format", "indent", "int", "last"}
    | {"length", "lower", "random", "replace", "safe", "string", "title", "trim", "upper"}
)
FILTER_COSTS: Final[Mapping[str, Cost]] = {  # of others: `reads`
    **dict.fromkeys(("attr", "count", "d", "default", "first", "items", "last", "length", "random", "safe"), free),
    **dict.fromkeys(("string", "capitalize", "lower", "reverse", "upper"), writes(2)),
    **dict.fromkeys(("e", "escape", "forceescape"), writes(8)),
    **dict.fromkeys(("title", "urlencode", "wordcount", "pprint"), writes(64)),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _orders),
    **dict.fromkeys(("urlize", "wordwrap", "xmlattr"), _wrap),
    "format": layout,
    "indent": _indent,
    "replace": _replace,
    "striptags": _strip_tags,
    "trim": _strip,
    "truncate": writes(2),
}
METHOD_COSTS: Final[Mapping[str, Cost]] = {  # of texts; of others: `reads`
    **dict.fromkeys(("count", "find", "index", "partition"), _finds),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _finds_backwards),
    **dict.fromkeys(("lstrip", "rstrip", "strip"), _strip),
    **dict.fromkeys(("title", "unescape"), writes(32)),
    "expandtabs": _expand_tabs,
    "join": _join,
    "replace": _replace,
    "rsplit": _split_backwards,
    "split": _split,
    "splitlines": _split_lines,
    "striptags": _strip_tags,
    "translate": _translate,
}
