from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from diptych.generation.page_hash import extra_key, page_hashes
from diptych.router.choose.cached_prefixes import ApproximateIndex, CachedPrefixes
from diptych.router.choose.prefix_index import KvNews, PrefixIndex
from diptych.router.choose.seen_prompts import MAX_PROMPTS, SeenPrompts
from diptych.router.console.cache.cache_state import MAX_PREFIXES, REFRESH_S, WINDOW_S, CacheView, cache_of, tiers_of
from diptych.router.console.history import Tokens
from diptych.router.console.pieces import at_once
from diptych.router.console.state import CacheTier
from diptych.v1.worker_pb2 import WorkerStatus

PAGE_SIZE = 16
A, B = 0xA, 0xB


@dataclass
class Served:
    """What was counted of finished requests, whatever the window."""

    found: Tokens = field(default_factory=lambda: Tokens(0, 0))
    asked_s: list[float] = field(default_factory=list)

    def tokens(self, window_s: float) -> Tokens:
        self.asked_s.append(window_s)
        return self.found


class Router:
    """The parts of a router that the view looks at."""

    def __init__(self, *, shows_text: bool = False) -> None:
        self.now_s = 1000.0
        self.seen = SeenPrompts(keeps_tokens=shows_text)
        self.served = Served()
        self.told = PrefixIndex()
        clock = lambda: self.now_s  # noqa: E731
        self.prefixes = CachedPrefixes(self.told, ApproximateIndex(clock), ApproximateIndex(clock))
        self.statuses: list[WorkerStatus] = []
        show = (lambda ids: " ".join(map(str, ids))) if shows_text else None
        self.view = CacheView(self.seen, self.served, self.prefixes, lambda: self.statuses, show)

    def see(self, tokens: Sequence[int], salt: bytes = b"", adapter: str = "") -> None:
        chains = {PAGE_SIZE: page_hashes(np.array(tokens, np.int64), PAGE_SIZE, extra_key(salt, adapter))}
        self.seen.note(self.now_s, len(tokens), chains, () if salt else tokens)

    def wait(self, duration_s: float) -> None:
        self.now_s += duration_s


def conversations(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that go on where earlier ones ended, or begin alike, or are new."""
    system = [[rng.randrange(10_000) for _ in range(rng.randrange(10, 400))] for _ in range(5)]
    prompts: list[list[int]] = []
    for _ in range(count):
        begun = rng.choice(prompts) if prompts and rng.random() < 0.5 else rng.choice(system)
        prompts.append(begun[: rng.randrange(1, len(begun) + 1)] + [rng.randrange(10_000) for _ in range(90)])
    return prompts


def infinite_cache(prompts: Sequence[Sequence[int]], cached: set[tuple[int, ...]] | None = None) -> float:
    """The share of tokens that a cache which forgets nothing has of prompts, one after the other."""
    known = set() if cached is None else cached
    found = 0
    for prompt in prompts:
        pages = [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt), PAGE_SIZE)]
        found += PAGE_SIZE * sum(page in known for page in pages)
        known.update(pages)
    return found / sum(map(len, prompts))


@pytest.mark.parametrize("seed", range(4))
def test_the_ceiling_is_what_a_cache_without_end_would_have_had(seed: int) -> None:
    router, prompts = Router(), conversations(random.Random(seed), 300)
    for prompt in prompts:
        router.see(prompt)
        router.wait(1.0)
    assert at_once(router.view.state(router.now_s))["ceiling"] == pytest.approx(infinite_cache(prompts), abs=0.02)


def test_the_ceiling_of_two_routers_knows_what_both_have_seen() -> None:
    rng, prompts = random.Random(9), conversations(random.Random(9), 300)
    routers = Router(), Router()
    for prompt in prompts:
        rng.choice(routers).see(prompt)
    parts = [at_once(router.view.counts(router.now_s)) for router in routers]
    together = at_once(cache_of(parts))["ceiling"]
    assert together == pytest.approx(infinite_cache(prompts), abs=0.02)
    assert (together or 0) > max(at_once(cache_of([part]))["ceiling"] or 0 for part in parts)


def test_what_was_seen_before_the_window_is_new_again() -> None:
    router = Router()
    prompt = list(range(1601))
    router.see(prompt)
    at_once(router.view.counts(router.now_s))
    router.wait(WINDOW_S / 2)
    router.see(prompt)
    state = at_once(router.view.state(router.now_s))
    assert state["ceiling"] == pytest.approx(800 / 1601, abs=0.01)
    assert state["window_s"] == WINDOW_S / 2
    router.wait(WINDOW_S / 2 + 120)
    assert at_once(router.view.state(router.now_s))["ceiling"] == pytest.approx(0.0, abs=0.01)
    router.wait(WINDOW_S)
    assert at_once(router.view.state(router.now_s))["ceiling"] is None


def test_the_hit_rate_is_that_of_the_same_window() -> None:
    router = Router()
    router.served.found = Tokens(1000, 250)
    router.see(list(range(100)))
    router.wait(40)
    state = at_once(router.view.state(router.now_s))
    assert (state["prompt_tokens"], state["cached_tokens"], state["hit_rate"]) == (1000, 250, 0.25)
    assert router.served.asked_s == [state["window_s"]] == [40]


def test_where_prompts_are_not_read_there_is_no_ceiling() -> None:
    router = Router()
    router.served.found = Tokens(1000, 250)
    router.seen.note(router.now_s, 100, {})
    state = at_once(router.view.state(router.now_s))
    assert (state["ceiling"], state["hit_rate"], state["window_s"]) == (None, 0.25, WINDOW_S)
    assert state["prefixes"] == {}


def test_without_requests_there_is_no_rate() -> None:
    state = at_once(Router().view.state(1000.0))
    assert (state["hit_rate"], state["ceiling"], state["tiers"]) == (None, None, {})


def test_after_prompts_that_nobody_counted_the_window_begins_anew() -> None:
    """Else pages would be taken for new ones that prompts had which were forgotten before anybody asked."""
    router = Router()
    for _ in range(10):
        router.see(list(range(100)))
    at_once(router.view.counts(router.now_s))
    router.wait(30)
    for _ in range(MAX_PROMPTS + 5):
        router.see(list(range(1000, 1100)))
    router.wait(10)
    state = at_once(router.view.state(router.now_s))
    assert state["window_s"] == 10
    pages, tokens = 6 * PAGE_SIZE, 100
    assert state["ceiling"] == pytest.approx(pages * (MAX_PROMPTS - 1) / (tokens * MAX_PROMPTS), abs=1e-4)


def test_an_answer_is_made_once_in_a_while() -> None:
    router = Router()
    router.see(list(range(100)))
    first = at_once(router.view.counts(router.now_s))
    router.see(list(range(100)))
    router.wait(REFRESH_S / 2)
    assert at_once(router.view.counts(router.now_s)) is first
    router.wait(REFRESH_S / 2)
    assert at_once(router.view.counts(router.now_s))["prefixes"] != {}


def test_a_prefix_names_who_has_it_and_what_it_continues() -> None:
    router, system = Router(), list(range(64))
    for tail in (1, 2, 3):
        router.see([*system, *([tail] * 40)])
    router.see([*system, *([3] * 40)])
    pages = page_hashes(np.array([*system, *([3] * 40)]), PAGE_SIZE)
    router.told.apply(A, KvNews(1, cleared=True, stored=pages[:4]))
    router.told.apply(B, KvNews(1, cleared=True, stored=pages))
    root, leaf = (f"{pages[index]:016x}" for index in (3, 5))
    workers = [f"{A:016x}", f"{B:016x}"]
    assert at_once(router.view.state(router.now_s))["prefixes"] == {
        root: {"parent": "", "num_tokens": 64, "num_requests": 4, "workers": workers, "text": ""},
        leaf: {"parent": root, "num_tokens": 96, "num_requests": 2, "workers": workers[1:], "text": ""},
    }


def test_text_is_the_end_of_a_prefix_where_it_is_allowed() -> None:
    for shows_text, text in ((False, ""), (True, " ".join(map(str, range(64, 96))))):
        router = Router(shows_text=shows_text)
        for _ in range(2):
            router.see(list(range(100)))
        (prefix,) = at_once(router.view.state(router.now_s))["prefixes"].values()
        assert prefix["text"] == text


def test_one_text_in_two_namespaces_is_two_prefixes_and_a_private_one_has_no_text() -> None:
    router = Router(shows_text=True)
    for _ in range(2):
        router.see(list(range(100)))
        router.see(list(range(100)), salt=b"mine")
        router.see(list(range(100)), salt=b"yours")
        router.see(list(range(100)), adapter="poet")
    found = at_once(router.view.state(router.now_s))["prefixes"].values()
    assert [each["num_requests"] for each in found] == [2, 2, 2, 2]
    assert sorted(bool(each["text"]) for each in found) == [False, False, True, True]


def test_prefixes_of_two_routers_are_one_tree() -> None:
    one, other, system = Router(), Router(), list(range(64))
    for tail in (1, 1, 2):
        one.see([*system, *([tail] * 40)])
    for _ in range(3):
        other.see([*system, *([2] * 40)])
    state = at_once(cache_of([at_once(each.view.counts(each.now_s)) for each in (one, other)]))
    pages = {tail: page_hashes(np.array([*system, *([tail] * 40)]), PAGE_SIZE) for tail in (1, 2)}
    root, first, second = (f"{pages[tail][index]:016x}" for tail, index in ((1, 3), (1, 5), (2, 5)))
    tree = {name: (each["parent"], each["num_requests"]) for name, each in state["prefixes"].items()}
    assert tree == {second: ("", 3), root: ("", 3), first: (root, 2)}


def test_there_are_so_many_prefixes_at_most_and_each_parent_is_among_them() -> None:
    rng, routers = random.Random(4), (Router(), Router())
    for prompt in conversations(rng, 400):
        rng.choice(routers).see(prompt)
    found = at_once(cache_of([at_once(each.view.counts(each.now_s)) for each in routers]))["prefixes"]
    assert len(found) == MAX_PREFIXES
    assert {each["parent"] for each in found.values()} - {""} <= found.keys()


def status(pages: Mapping[str, int], **fields: int) -> WorkerStatus:
    return WorkerStatus(pages_by_state=pages, **fields)  # type: ignore[arg-type]


def test_tiers_are_told_as_soon_as_workers_have_told_of_them() -> None:
    router = Router()
    before = at_once(router.view.counts(router.now_s))
    assert at_once(router.view.counts(router.now_s)) is before
    router.statuses = [WorkerStatus(pages_by_state={"cached": 3, "free": 5})]
    told = at_once(router.view.counts(router.now_s))
    assert told == {**before, "tiers": tiers_of(router.statuses)}
    assert at_once(router.view.counts(router.now_s)) is told


def test_tiers_are_the_sums_of_what_workers_tell() -> None:
    workers = [
        status({"free": 10, "cached": 5, "owned": 1}),
        status({"free": 1, "cached": 2}, host_pages=7, host_pages_saved=9, host_pages_restored=3),
        status({}),
    ]
    assert tiers_of(workers) == {
        "pool": CacheTier(pages=7, capacity_pages=19, saved_pages=None, restored_pages=None),
        "host": CacheTier(pages=7, capacity_pages=None, saved_pages=9, restored_pages=3),
    }
    assert tiers_of(workers[:1]).keys() == {"pool"}


def test_files_and_a_shared_store_are_tiers_of_their_own() -> None:
    def worker(shared_pages: int) -> WorkerStatus:
        found = status({"cached": 2}, host_pages=7, host_pages_saved=9, host_pages_restored=3)
        sizes = {"pool": (2, 8), "host": (4, 16), "files": (3, 64), "shared": (shared_pages, 0)}
        for name, (pages, capacity_pages) in sizes.items():
            found.cache.tiers.add(name=name, pages=pages, capacity_pages=capacity_pages)
        found.files.pages_written, found.files.pages_read = 5, 1
        found.shared.pages_written, found.shared.pages_read = 6, 2
        return found

    assert tiers_of([worker(100), worker(90)]) == {
        "pool": CacheTier(pages=4, capacity_pages=4, saved_pages=None, restored_pages=None),
        "host": CacheTier(pages=8, capacity_pages=32, saved_pages=None, restored_pages=None),
        "files": CacheTier(pages=6, capacity_pages=128, saved_pages=10, restored_pages=2),
        "shared": CacheTier(pages=100, capacity_pages=None, saved_pages=12, restored_pages=4),
    }


def test_without_workers_there_are_no_tiers() -> None:
    assert tiers_of([]) == {}
