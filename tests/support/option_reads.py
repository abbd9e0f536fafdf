"""Finds options of commands that nothing reads, in the text of modules. Pure.

An option is a field of a configuration: a class with `option(...)` fields. It is read where the attribute is taken of
something that holds a configuration (a name annotated as one somewhere, like `config` or `options`), or of `self`
in a method of the configuration that is itself used. To be validated is not to be read: `validate`, and what only that
calls, does not count; neither does a loop over names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

DECLARE: Final = "option"
NOT_COUNTED: Final = "validate"


@dataclass
class Config:
    """A class of options."""

    name: str
    bases: frozenset[str]
    options: frozenset[str]
    methods: Mapping[str, frozenset[str]] = field(default_factory=dict)  # attributes of `self` that each takes


def unread_options(modules: Iterable[str]) -> set[tuple[str, str]]:
    """Return (class, option) of those that nothing reads."""
    trees = [ast.parse(text) for text in modules]
    configs = {config.name: config for tree in trees for config in _configs(tree)}
    _inherit_kinds(trees, configs)
    holders = {name for tree in trees for name in _holders(tree, configs.keys())}
    outside = {attribute for tree in trees for attribute in _attributes(tree, holders, configs.keys())}
    family = {name: _family(name, configs) for name in configs}
    return {
        (name, each)
        for name, config in configs.items()
        for each in config.options
        if each not in outside and each not in _used_by_methods([configs[one] for one in family[name]], outside)
    }


def _configs(tree: ast.Module) -> Iterator[Config]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            options = frozenset(_declared(node))
            yield Config(node.name, frozenset(map(_name, node.bases)), options, dict(_methods(node)))


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call) and _name(line.value.func) == DECLARE:
            yield _name(line.target)


def _methods(node: ast.ClassDef) -> Iterator[tuple[str, frozenset[str]]]:
    for line in node.body:
        if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
            yield line.name, frozenset(_attributes(line, {"self"}, ()))


def _inherit_kinds(trees: Iterable[ast.Module], configs: dict[str, Config]) -> None:
    """Leave only classes of options, and what is made of them."""
    kept = {name for name, config in configs.items() if config.options}
    while more := {name for name, config in configs.items() if name not in kept and config.bases & kept}:
        kept |= more
    for name in configs.keys() - kept:
        del configs[name]


def _family(name: str, configs: Mapping[str, Config]) -> set[str]:
    """Return a class and all that are made of it: methods of these see its options."""
    found = {name}
    while more := {each for each, config in configs.items() if each not in found and config.bases & found}:
        found |= more
    return found


def _holders(tree: ast.Module, names: Iterable[str]) -> Iterator[str]:
    """Yield the names that are annotated as a configuration."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and _mentions(node.annotation, names):
            name = node.arg if isinstance(node, ast.arg) else _name(node.target)
            yield from (name, f"_{name}")


def _mentions(annotation: ast.expr | None, names: Iterable[str]) -> bool:
    """Whether an annotation names one of the classes."""
    return annotation is not None and any(_name(part) in names for part in ast.walk(annotation))


def _attributes(tree: ast.AST, holders: set[str], configs: Iterable[str]) -> Iterator[str]:
    """Yield what is taken of `holders`; arguments of a function that are annotated as something else are none."""
    left = [(tree, holders)]
    while left:
        node, known = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            known = known - {
                each.arg for each in arguments if each.annotation and not _mentions(each.annotation, configs)
            }
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _name(node.value) in known:
            yield node.attr
        left += [(child, known) for child in ast.iter_child_nodes(node)]


def _used_by_methods(family: Iterable[Config], outside: set[str]) -> set[str]:
    """Return the attributes that methods take which are used from outside, be it by one another."""
    methods: dict[str, set[str]] = {}
    for config in family:
        for name, taken in config.methods.items():
            methods.setdefault(name, set()).update(taken)
    used = {name for name in methods if name in outside and name != NOT_COUNTED}
    while more := {called for name in used for called in methods[name] if called in methods} - used:
        used |= more
    return {attribute for name in used for attribute in methods[name]}


def _name(node: ast.AST) -> str:
    """Return the last name of an expression; empty for one that has none."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
