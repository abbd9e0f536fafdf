"""Holds docstrings and names against the house's rules of prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("kernels", "kvtransfer", "services")
SOURCES: Final = (*PRODUCT, "bench", "e2e", "helm", "images", "locks", "tests")
BEGINS_WITH_OF: Final = re.compile(r'^\s*[rR]?"""\s*Of\b', re.MULTILINE)
NAMED: Final = re.compile(r"^ *(?:class|def|async def|type) (\w+)|^(\w+)(?:: [^=]+)? = ", re.MULTILINE)
HOUSE_WORDS: Final = frozenset(
    {"ask", "conversation", "crowd", "dearness", "departure", "excuse", "pulse", "standing", "story", "wish"}
)  # that the field has another word for, or none


def _sources(roots: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for root in roots:
        for path in sorted((ROOT / root).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text()


def _house_words(source: str) -> set[str]:
    """The house words at the end of the names that are given in a module."""
    names = [first or second for first, second in NAMED.findall(source)]
    return {re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)[-1].lower() for name in names if name.strip("_")} & HOUSE_WORDS


def _explained(glossary: str) -> set[str]:
    cells = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)
    return {word.strip() for cell in cells for word in re.sub(r"\(.*?\)", "", cell).split(",")}


def test_no_docstring_begins_with_of() -> None:
    assert [str(path) for path, source in _sources(SOURCES) if BEGINS_WITH_OF.search(source)] == []


@pytest.mark.parametrize(
    "source", ['"""Of one process."""', 'def f():\n    r"""\n    Of it."""', 'x = 1\n"""Of it."""']
)
def test_a_docstring_that_begins_with_of_is_noticed(source: str) -> None:
    assert BEGINS_WITH_OF.search(source)
    assert not BEGINS_WITH_OF.search(source.replace("Of ", "Offers "))


def test_words_of_the_house_stand_in_the_glossary() -> None:
    used = set[str]().union(*(_house_words(source) for _, source in _sources(PRODUCT)))
    assert used
    assert used - _explained((ROOT / "docs/develop/glossary.md").read_text()) == set()


def test_a_word_of_the_house_in_a_name_is_noticed() -> None:
    assert _house_words("class SloWish(NamedTuple):\n    def excuse(self): ...\nAsk = Callable\nwished: int = 3\n") == {
        "ask",
        "excuse",
        "wish",
    }
    assert _explained("| wish | x |\n| reserve, headroom | y |\n| ask (of a probe) | z |\n") == {
        "wish",
        "reserve",
        "headroom",
        "ask",
    }
