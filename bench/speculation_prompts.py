"""Texts of whose kind outputs repeat much, or little: prompts for the benchmark of speculation.

Code is the standard library's own, so a prompt is as long as real work; a small model repeats what it reads reliably
only where the prompt has begun to.
"""

from __future__ import annotations

import difflib
import fractions
import inspect
import json
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence

NAMES = ("Anna", "Bob", "Carla", "David", "Eva", "Frank", "Grete", "Hugo", "Ines", "Jonas", "Klara", "Leo")
CITIES = ("Berlin", "Paris", "Rome", "Madrid", "Vienna", "Oslo", "Lisbon", "Prague", "Dublin", "Athens")
PRODUCTS = ("lamp", "chair", "kettle", "bicycle", "tent", "camera", "blanket", "radio", "ladder", "mirror")
ARTICLES = (
    """The harbour town had lived from its herring for three hundred years before the first steamer came. Boats left
with the evening tide and were back by dawn, and the women who gutted the catch were paid by the barrel. When the
railway reached the coast in 1871, fish that had been salted for a winter could be sold fresh in the capital the next
morning. Prices doubled within a year. So did the fleet, and by the turn of the century a man could walk across the
harbour from deck to deck. The end came quietly. In 1928 the herring stayed away, and the year after they did so again.""",
    """A glacier is a river that has forgotten how to hurry. Snow that falls on its upper basin is buried by the next
winter's snow, and the next, until the air is pressed out of it and it turns to ice as clear as glass. The ice begins
to creep downhill under its own weight, a few centimetres a day. On its way it tears stones from the bed and carries
them along, and with these it planes the valley floor as a carpenter planes a board. Where it melts at last, it leaves
everything that it has carried in a ridge of rubble, which is called a moraine.""",
)
STORIES = (
    "Write a long story about a fisherman who finds a strange shell on the beach.",
    "Describe what a city might look like in two hundred years.",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "Write a letter to a friend about a journey through the mountains in autumn.",
)


def code_edits() -> list[str]:
    """Files, and the same with one name changed, which has begun."""
    functions: Sequence[tuple[Callable[..., object], str, str]] = (
        (textwrap.dedent, "margin", "indent"),
        (random.Random.shuffle, "x", "items"),
        (fractions.Fraction.limit_denominator, "bound", "limit"),
        (difflib.SequenceMatcher.get_matching_blocks, "queue", "pending"),
    )
    return [_edit(inspect.getsource(function), old, new) for function, old, new in functions]


def _edit(source: str, old: str, new: str) -> str:
    begun = "\n".join(source.splitlines()[:2])
    return (
        f"Here is a function:\n\n```python\n{source}```\n\n"
        f"Here is the same function, in which `{old}` is called `{new}`:\n\n```python\n{begun}\n"
    )


def json_records() -> list[str]:
    """Lists of records, and as JSON, of which two have begun."""
    rng = random.Random(5)
    people = [{"name": name, "age": rng.randrange(18, 90), "city": rng.choice(CITIES)} for name in NAMES]
    orders: list[dict[str, object]] = [
        {"product": product, "quantity": rng.randrange(1, 20), "price": rng.randrange(5, 900), "shipped": True}
        for product in PRODUCTS
    ]
    return [_records(people), _records(orders)]


def _records(records: Sequence[Mapping[str, object]]) -> str:
    lines = "\n".join(", ".join(map(str, record.values())) for record in records)
    begun = ",\n".join(textwrap.indent(json.dumps(record, indent=2), "  ") for record in records[:2])
    return f"{', '.join(records[0])}\n{lines}\n\nAs JSON:\n\n```json\n[\n{begun},\n"


def quotes() -> list[str]:
    """Articles, and a list of what they say, in their own words."""
    return [_quoted(article.replace("\n", " ")) for article in ARTICLES]


def _quoted(article: str) -> str:
    first = article.split(". ", maxsplit=1)[0]
    return f'{article}\n\nThe article, quoted sentence by sentence:\n\n- "{first}."\n- "'


def stories() -> list[str]:
    """Questions whose answers repeat little."""
    return list(STORIES)
