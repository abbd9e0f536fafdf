"""How large the house is: modules, lines, folders, importers, functions, classes, arguments, counted in the sources.

    python bench/house.py [--against CHECKOUT]

Only what git tracks counts, and no generated code. Lines of a function are those without its docstring, as they stand
in the file; kernels, whose bodies are programs for a GPU, are left out where functions and arguments are counted.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

OURS: Final = Path(__file__).parents[1]
ROOTS: Final = ("kernels", "kvtransfer", "services")
MOST_MODULES, SHORT, MOST_LINES, MOST_METHODS, MOST_ARGUMENTS, LONG_FILE = 20, 60, 20, 25, 6, 500
Function = ast.FunctionDef | ast.AsyncFunctionDef
Figures = Mapping[str, str]


class Module(NamedTuple):
    """A source file."""

    path: Path
    name: str
    num_lines: int
    tree: ast.Module


def modules_of(root: Path) -> Sequence[Module]:
    """Read the product's modules of a checkout."""
    tracked = subprocess.run(["git", "ls-files", *ROOTS], cwd=root, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in tracked.splitlines() if line.endswith(".py") and "_pb2" not in line]
    return [_module(root, path) for path in paths]


def _module(root: Path, path: Path) -> Module:
    text = (root / path).read_text()
    parts = path.with_suffix("").parts[1:]
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(path, name, len(text.splitlines()), ast.parse(text))


def figures_of(modules: Sequence[Module]) -> Figures:
    """Return what is counted, as words of a table."""
    lines = [module.num_lines for module in modules]
    folders = Counter(module.path.parent for module in modules if module.path.name != "__init__.py")
    alone, alone_short = _with_one_importer(modules)
    computing = [module for module in modules if module.path.parts[0] != "kernels"]
    functions = [node for module in computing for node in ast.walk(module.tree) if isinstance(node, Function)]
    lengths = [_num_lines(function) for function in functions]
    classes = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    methods = [sum(isinstance(each, Function) for each in node.body) for node in classes]
    empty = sum(module.path.name == "__init__.py" and not module.tree.body for module in modules)
    return {
        "modules, lines": f"{len(modules):,}, {sum(lines):,}",
        "lines of a module, median and most": f"{statistics.median(lines):.0f}, {max(lines)}",
        f"modules of more than {LONG_FILE} lines": f"{sum(each > LONG_FILE for each in lines)}",
        f"folders; with more than {MOST_MODULES} modules; the largest": (
            f"{len(folders)}; {sum(each > MOST_MODULES for each in folders.values())}; {max(folders.values())}"
        ),
        f"modules with one importer; of these below {SHORT} lines": f"{alone}; {alone_short}",
        "empty `__init__`": f"{empty}",
        "functions; median, 90 % and most of their lines": (
            f"{len(lengths):,}; {statistics.median(lengths):.0f}, {_at(lengths, 0.9)}, {max(lengths)}"
        ),
        f"functions of more than {MOST_LINES}, 30 and 40 lines": (
            ", ".join(f"{sum(each > most for each in lengths)}" for most in (MOST_LINES, 30, 40))
        ),
        f"classes with more than {MOST_METHODS} methods": f"{sum(each > MOST_METHODS for each in methods)}",
        f"functions with more than {MOST_ARGUMENTS} arguments": (
            f"{sum(_num_arguments(each) > MOST_ARGUMENTS for each in functions)}"
        ),
    }


def _with_one_importer(modules: Sequence[Module]) -> tuple[int, int]:
    names = {module.name for module in modules}
    importers = defaultdict[str, set[str]](set)
    for module in modules:
        for name in _read_by(module.tree, names):
            importers[name].add(module.name)
    alone = [
        each for each in modules if each.path.name != "__init__.py" and len(importers[each.name] - {each.name}) == 1
    ]
    return len(alone), sum(each.num_lines < SHORT for each in alone)


def _read_by(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield the modules that one imports, by a statement or by their name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(package), level=0):
                whole = [f"{package}.{alias.name}" for alias in node.names]
                yield from (each if each in names else package for each in whole)
            case ast.Constant(value=str(text)) if text in names:
                yield text


def _num_lines(function: Function) -> int:
    first = function.body[0]
    is_documented = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def _num_arguments(function: Function) -> int:
    given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return sum(each.arg not in ("self", "cls") for each in given)


def _at(values: Sequence[int], share: float) -> int:
    return sorted(values)[int(share * len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another tree of this project")
    against = parser.parse_args().against
    trees = {"now": OURS} if against is None else {str(against): against, "now": OURS}
    columns = {name: figures_of(modules_of(root)) for name, root in trees.items()}
    print(f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", sep="\n")
    for row in columns["now"]:
        print(f"| {row} | {' | '.join(figures[row] for figures in columns.values())} |")


if __name__ == "__main__":
    main()
