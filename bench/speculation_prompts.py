"""Requests whose outputs repeat much of what was read, or little: for the benchmark of speculation.

Each is a prompt and the answer that a capable model gives: a file with one name changed, records as JSON, an article
quoted, or text as people write it. Code is the standard library's own, prose that of this project's documentation.
"""

from __future__ import annotations

import difflib
import fractions
import inspect
import json
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs/concepts"
PAGES = ("hand-off.md", "scheduling.md", "routing.md", "prefix-cache.md")
PROMPT_CHARS, ANSWER_CHARS = 500, 1000  # of a page's prose
NAMES = ("Anna", "Bob", "Carla", "David", "Eva", "Frank", "Grete", "Hugo", "Ines", "Jonas")
CITIES = ("Berlin", "Paris", "Rome", "Madrid", "Vienna", "Oslo", "Lisbon", "Prague", "Dublin", "Athens")
PRODUCTS = ("lamp", "chair", "kettle", "bicycle", "tent", "camera", "blanket", "radio", "ladder", "mirror")
ARTICLES = (
    """The harbour town had lived from its herring for three hundred years before the first steamer came. Boats left
with the evening tide and were back by dawn, and the women who gutted the catch were paid by the barrel. When the
railway reached the coast in 1871, fish that had been salted for a winter could be sold fresh in the capital the next
morning. Prices doubled within a year. So did the fleet, and by the turn of the century a man could walk across the
harbour from deck to deck. The end came quietly. In 1928 the herring stayed away, and the next year too.""",
    """A glacier is a river that has forgotten how to hurry. Snow that falls on its upper basin is buried by the next
winter's snow, and the next, until the air is pressed out of it and it turns to ice as clear as glass. The ice begins
to creep downhill under its own weight, a few centimetres a day. On its way it tears stones from the bed and carries
them along, and with these it planes the valley floor as a carpenter planes a board. Where it melts at last, it leaves
everything that it has carried in a ridge of rubble, which is called a moraine.""",
)


class Asked(NamedTuple):
    """A request."""

    prompt: str
    answer: str


def code_edits() -> list[Asked]:
    functions: Sequence[tuple[Callable[..., object], str, str]] = (
        (textwrap.dedent, "margin", "indent"),
        (random.Random.shuffle, "x", "items"),
        (fractions.Fraction.limit_denominator, "bound", "limit"),
        (difflib.SequenceMatcher.get_matching_blocks, "queue", "pending"),
    )
    return [_edit(inspect.getsource(function), old, new) for function, old, new in functions]


def _edit(source: str, old: str, new: str) -> Asked:
    changed = re.sub(rf"\b{old}\b", new, source)
    return Asked(f"Rename `{old}` to `{new}`:\n\n```python\n{source}```", f"```python\n{changed}```")


def json_records() -> list[Asked]:
    rng = random.Random(5)
    people: list[dict[str, object]] = [
        {
            "first_name": name,
            "age_in_years": rng.randrange(18, 90),
            "home_city": rng.choice(CITIES),
            "is_member": rng.random() < 0.5,
            "email_address": f"{name.lower()}@example.com",
        }
        for name in NAMES
    ]
    orders: list[dict[str, object]] = [
        {
            "product": product,
            "quantity": rng.randrange(1, 20),
            "unit_price": rng.randrange(5, 900),
            "has_been_shipped": rng.random() < 0.5,
        }
        for product in PRODUCTS
    ]
    return [_records(people), _records(orders)]


def _records(records: Sequence[Mapping[str, object]]) -> Asked:
    lines = "\n".join(", ".join(map(str, record.values())) for record in records)
    asked = f"As JSON with the keys {', '.join(records[0])}:\n\n{lines}"
    return Asked(asked, f"```json\n{json.dumps(records, indent=2)}\n```")


def quotes() -> list[Asked]:
    return [_quoted(article.replace("\n", " ")) for article in ARTICLES]


def _quoted(article: str) -> Asked:
    sentences = re.split(r"(?<=\.) ", article)
    listed = "\n".join(f'- "{sentence}"' for sentence in sentences)
    return Asked(f"Quote this article sentence by sentence.\n\n{article}", f"The article says:\n\n{listed}")


def prose() -> list[Asked]:
    return [_continued((DOCS / page).read_text()) for page in PAGES]


def _continued(page: str) -> Asked:
    paragraphs = [part.replace("\n", " ") for part in page.split("\n\n") if part[:1].isalpha()]
    text = "\n\n".join(paragraphs)
    answer = text[PROMPT_CHARS : PROMPT_CHARS + ANSWER_CHARS]
    return Asked(f"Continue this text:\n\n{text[:PROMPT_CHARS]}", answer)
