"""Documents of the console for a fleet that does not exist: seeded, and moving a little with each tick. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from feed_stories import story_of

from diptych.common.members.roles import WorkerRole
from diptych.router.console.state import (
    CacheState,
    Charts,
    FleetState,
    Link,
    PoolSignal,
    Prefix,
    RequestList,
    RequestRow,
    RequestStory,
    RouterCard,
    Step,
    Steps,
    Unpaired,
    WorkerCard,
)

TICK_S: Final = 0.25
PAGES: Final = 4096
MODEL: Final = "HuggingFaceTB/SmolLM2-360M-Instruct"
PATHS: Final = (("copy", "nvlink"), ("put", "rc_mlx5"), ("message", "tcp"), ("staged", "rc_mlx5"))
MAX_LINKS: Final = 32
MAX_UNPAIRED: Final = 200
ADAPTERS: Final = ("", "", "", "support-de", "sql")

Json = dict[str, Any]
Name = WorkerRole


def merge_patch(old: Any, new: Any) -> Any:
    """Return what makes `new` of `old` (RFC 7396); an empty mapping where they are equal."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    patch: Json = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif old[key] != value:
            patch[key] = merge_patch(old[key], value)
    return patch


@dataclass(slots=True)
class _Pace:
    """How a worker's steps go."""

    next_ms: float
    running: Step | None = None
    joining: list[tuple[str, float]] = field(default_factory=list)  # rooms, and when their pages are there


class Platform:
    """A fleet of `prefill` + `decode` + `unified` workers, and the requests that it serves."""

    def __init__(self, prefill: int, decode: int, unified: int = 0, *, seed: int = 7, now_s: float = 1_800_000_000.0):
        self.rng = random.Random(seed)
        self.now_s = now_s
        self.begun_s = now_s
        self.router = self._instance()
        self.problem: str | None = None
        self.model = MODEL
        self.tenants: tuple[str, ...] = ("atlas", "borealis", "default")
        self.workers: dict[str, WorkerCard] = {}
        self.rows: dict[str, RequestRow] = {}
        self._paces: dict[str, _Pace] = {}
        self._mood: dict[str, float] = {}
        self._ordinals: dict[str, int] = {}
        counts: tuple[tuple[Name, int], ...] = (("prefill", prefill), ("decode", decode), ("unified", unified))
        for role, num in counts:
            for index in range(num):
                self.add(role, f"{role}-{index}")
        self.weave()
        for _ in range(90):
            self._live_through(self.rows[self._arrive(self.now_s - self.rng.uniform(0, 60))])
        self.tick()

    def _instance(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    def add(self, role: Name, pod: str) -> str:
        """A worker more; its links come with the next `weave`."""
        instance = self._instance()
        self.workers[instance] = _card(role, pod, len(self.workers), self.now_s - self.rng.uniform(60, 90_000))
        self._paces[instance] = _Pace(self.now_s * 1000)
        self._mood[instance] = self.rng.random()
        self._ordinals[instance] = len(self._ordinals)
        return instance

    def weave(self) -> None:
        """Give every pair that may serve its links, of which a few are not up."""
        for sender, receiver in self._may_pair():
            if receiver not in self.workers[sender]["links"]:
                path = PATHS[_kind_of(self._ordinals[sender], self._ordinals[receiver])]
                state = _link_state(self.rng)
                self.workers[sender]["links"][receiver] = _link(path, state, self.rng)
                self.workers[receiver]["links"].setdefault(sender, _link(path, state, self.rng))
        for card in self.workers.values():
            card["num_links_up"] = sum(link["state"] == "up" for link in card["links"].values())

    def _may_pair(self) -> Iterator[tuple[str, str]]:
        for sender, first in self.workers.items():
            for receiver, second in self.workers.items():
                if sender != receiver and first["role"] != "decode" and second["role"] != "prefill":
                    yield sender, receiver

    # What happens to workers.

    def kill(self, instance: str) -> None:
        """The worker is gone at once."""
        del self.workers[instance]
        for card in self.workers.values():
            card["links"].pop(instance, None)

    def drain(self, instance: str, deadline_s: float = 120.0) -> None:
        card = self.workers[instance]
        card["state"] = "draining"
        card["drain"] = {
            "phase": "draining",
            "requests_left": max(3, card["num_running"]),
            "oldest_s": 14.2,
            "deadline_s": deadline_s,
        }

    def flip(self, instance: str, role: Name) -> None:
        """The worker serves another role; it meets other peers."""
        self.workers[instance]["role"] = role
        self.workers[instance]["links"] = {}
        for card in self.workers.values():
            card["links"].pop(instance, None)
        self.weave()

    def freeze(self, instance: str) -> None:
        """The worker answers no more: it is left alone."""
        self.workers[instance]["breaker"] = "did not answer in 2 s; tried again in 8 s"
        self.workers[instance]["rate"] = None

    def silence(self, instance: str, silent_s: str) -> None:
        self.workers[instance]["silent_s"] = int(silent_s)

    def hold_back(self, instance: str, why: str) -> None:
        self.workers[instance]["not_ready"] = why
        self.workers[instance]["state"] = "loading"

    # Time.

    def tick(self) -> None:
        """`TICK_S` pass."""
        self.now_s += TICK_S
        for instance, card in self.workers.items():
            self._move(instance, card)
        for row in self.rows.values():
            _advance(row, self.now_s, self.rng)
        if self.workers and self.rng.random() < 0.5:
            self._arrive(self.now_s)
        ended = [name for name, row in self.rows.items() if row["phase"] == "ended"]
        for name in ended[: max(0, len(self.rows) - 120)]:
            del self.rows[name]

    def _move(self, instance: str, card: WorkerCard) -> None:
        mood = self._mood[instance] = min(1.0, max(0.0, self._mood[instance] + self.rng.uniform(-0.05, 0.05)))
        if card["state"] != "ready" or card["breaker"]:
            _rest(card, self.rng)
            return
        is_prefill = card["role"] == "prefill"
        card["queue_s"] = round(mood * (1.8 if is_prefill else 0.25), 3)
        card["num_running"] = int(1 + mood * (6 if is_prefill else 38))
        card["num_waiting"] = int(mood * (9 if is_prefill else 3))
        card["queued_tokens"] = int(card["num_waiting"] * 1900 * mood)
        card["kv_pages"] = _pages(mood, card["role"], self.rng)
        card["rate"] = {
            "steps_per_s": round((6 if is_prefill else 22) * (0.8 + 0.4 * mood), 1),
            "prompt_tokens_per_s": round(0.0 if card["role"] == "decode" else 21_000 * (0.3 + mood), 0),
            "output_tokens_per_s": round(0.0 if is_prefill else 900 * (0.2 + mood), 0),
            "busy": round(min(1.0, 0.25 + mood * 0.75), 3),
        }
        card["host_pages_saved"] = (card["host_pages_saved"] or 0) + self.rng.randrange(8)
        for link in card["links"].values():
            _flow(link, self.rng, 0.12 * min(1.0, 8 / len(card["links"])))

    # Documents.

    def fleet(self) -> FleetState:
        """The topic `fleet`, cut as the router cuts it."""
        missing = self._unpaired()
        return {
            "router": self.router,
            "version": "0.1.0",
            "model": self.model,
            "problem": self.problem,
            "routers": {
                self.router: _router("router-0", True),
                "00000000000000aa": {
                    "address": "10.0.0.3:8000",
                    "version": "0.1.0",
                    "pod": "router-1",
                    "is_here": False,
                },
            },
            "workers": {instance: {**card, "links": _told(card["links"])} for instance, card in self.workers.items()},
            "unpaired": dict(list(missing.items())[:MAX_UNPAIRED]),
            "num_unpaired": len(missing),
            "pools": {role: signal for role in ("prefill", "decode", "unified") if (signal := self._signal(role))},
        }

    def _unpaired(self) -> dict[str, Unpaired]:
        return {
            f"{sender}-{receiver}": {"prefill": sender, "decode": receiver, "why": link["reason"]}
            for sender, card in self.workers.items()
            for receiver, link in card["links"].items()
            if card["role"] != "decode" and link["state"] != "up"
        }

    def _signal(self, role: Any) -> PoolSignal | None:
        cards = [card for card in self.workers.values() if card["role"] == role]
        if not cards:
            return None
        ready = [card for card in cards if card["state"] == "ready"]
        queues = [card["queue_s"] or 0.0 for card in ready]
        queue_s = sum(queues) / len(queues) if queues else None
        held = sum(PAGES - card["kv_pages"].get("free", 0) - card["kv_pages"].get("cached", 0) for card in ready)
        return {
            "role": role,
            "num_workers": len(cards),
            "num_ready": len(ready),
            "queue_s": queue_s,
            "kv_share": held / (PAGES * max(1, len(ready))),
            "weight": None,
            "words": _signal_words(queue_s),
        }

    def steps(self) -> Steps:
        """The steps that ended since this was asked last."""
        until_ms = self.now_s * 1000
        return {"workers": {name: rows for name in self.workers if (rows := list(self._steps_of(name, until_ms)))}}

    def history(self, seconds: float) -> Steps:
        """The steps of the time before the platform was looked at."""
        workers: dict[str, list[Step]] = {}
        begun_ms = (self.now_s - seconds) * 1000
        for pace in self._paces.values():
            pace.next_ms, pace.running = begun_ms, None
        for until_ms in range(int(begun_ms), int(self.now_s * 1000) + 1, int(TICK_S * 1000)):
            for name in self.workers:
                workers.setdefault(name, []).extend(self._steps_of(name, until_ms))
        return {"workers": workers}

    def _steps_of(self, instance: str, until_ms: float) -> Iterator[Step]:
        card, pace, mood = self.workers[instance], self._paces[instance], self._mood[instance]
        if card["state"] != "ready" or card["breaker"]:
            pace.next_ms, pace.running = until_ms, None
            return
        while True:
            step = pace.running = pace.running or self._step(card["role"], pace, mood)
            if step[0] + step[1] > until_ms:
                return
            pace.running = None
            pace.next_ms = step[0] + step[1] + self._gap_ms(mood)
            yield (round(step[0], 2), round(step[1], 2), *step[2:])

    def _gap_ms(self, mood: float) -> float:
        return self.rng.uniform(100, 900) if self.rng.random() < 0.06 * (1.2 - mood) else self.rng.uniform(0.3, 3)

    def _step(self, role: Name, pace: _Pace, mood: float) -> Step:
        rng, handed, joined = self.rng, list[str](), list[str]()
        begun_ms = pace.next_ms
        if role == "prefill":
            duration_ms = rng.uniform(90, 190)
            if rng.random() < 0.35:
                handed = [self._hand_off(begun_ms + duration_ms)]
            return (begun_ms, duration_ms, rng.randrange(300, 2049), 0, rng.randrange(1, 5), handed, joined)
        if pace.joining and pace.joining[0][1] < begun_ms:
            joined, pace.joining = [pace.joining[0][0]], pace.joining[1:]
        prompt = rng.randrange(64, 512) if role == "unified" and rng.random() < 0.3 else 0
        num = int(2 + mood * 36)
        return (begun_ms, rng.uniform(28, 46) + prompt / 8, prompt, num, num, handed, joined)

    def _hand_off(self, ended_ms: float) -> str:
        room = self._instance()
        peers = [name for name, card in self.workers.items() if card["role"] == "decode" and card["state"] == "ready"]
        if peers:
            self._paces[self.rng.choice(peers)].joining.append((room, ended_ms + self.rng.uniform(8, 60)))
        return room

    def requests(self) -> RequestList:
        return {"rows": {name: {**row} for name, row in self.rows.items()}}

    def _live_through(self, row: RequestRow) -> None:
        """What a call that came earlier has done since."""
        for tick in range(int((self.now_s - row["arrived_unix_s"]) / TICK_S)):
            _advance(row, row["arrived_unix_s"] + tick * TICK_S, self.rng)

    def serve_chat(self) -> str:
        """A call that just came, and has its first token already. Returns its id."""
        name = self._arrive(self.now_s - 0.4)
        self.rows[name] |= {"phase": "output", "ttft_s": 0.3, "duration_s": 0.4, "num_attempts": 1}
        return name

    def _arrive(self, arrived_s: float) -> str:
        name = f"req-{self.rng.getrandbits(48):012x}"
        prefill = [i for i, card in self.workers.items() if card["role"] != "decode"]
        decode = [i for i, card in self.workers.items() if card["role"] != "prefill"]
        self.rows[name] = {
            "id": name,
            "router": self.router,
            "phase": "waiting",
            "outcome": "",
            "status": None,
            "path": self.rng.choice(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")),
            "tenant": self.rng.choice(self.tenants),
            "model": self.model,
            "adapter": self.rng.choice(ADAPTERS),
            "arrived_unix_s": arrived_s,
            "duration_s": 0.0,
            "ttft_s": None,
            "prompt_tokens": self.rng.randrange(40, 9000),
            "cached_tokens": 0,
            "output_tokens": 0,
            "num_attempts": 1 if self.rng.random() < 0.9 else 2,
            "prefill": self.rng.choice(prefill) if prefill else "",
            "decode": self.rng.choice(decode) if decode else "",
        }
        return name

    def story(self, name: str) -> RequestStory | None:
        row = self.rows.get(name)
        return None if row is None else story_of(row, self.workers, random.Random(name))

    def cache(self) -> CacheState:
        return _cache(list(self.workers), random.Random(3), self.now_s)

    def charts(self) -> Charts:
        return _charts(self.now_s, random.Random(5))


def _router(pod: str, is_here: bool) -> RouterCard:
    return {"address": f"{pod}:8000", "version": "0.1.0", "pod": pod, "is_here": is_here}


def _card(role: Name, pod: str, index: int, started_s: float) -> WorkerCard:
    return {
        "role": role,
        "pool": role,
        "pod": pod,
        "address": f"10.0.{1 + index // 200}.{10 + index % 200}:9100",
        "version": "0.1.0",
        "model": MODEL,
        "compat": "5f2c9e1ab7d04c33",
        "state": "ready",
        "not_ready": "",
        "is_connected": True,
        "silent_s": 0,
        "is_paused": False,
        "breaker": "",
        "started_unix_s": started_s,
        "queue_s": 0.0,
        "num_running": 0,
        "num_waiting": 0,
        "queued_tokens": 0,
        "page_size": 16,
        "kv_pages": {"free": PAGES},
        "total_pages": PAGES,
        "host_pages": 16_384,
        "host_pages_saved": 5200 + index * 13,
        "host_pages_restored": 1830 + index * 7,
        "rate": None,
        "drain": None,
        "nodes": [],
        "adapters": ["support-de", "sql"] if index % 3 == 0 else [],
        "links": {},
        "num_links_up": None,
        "integrity_failures": 0,
        "leaks_found": 0,
        "retractions": index % 3,
        "max_requests": 256,
        "max_step_tokens": 2048,
        "pages_pulled": 310,
        "pages_lent": 120,
        "drafts_verified": 900,
        "drafts_accepted": 640,
        "weights_taken_bytes": 0,
        "cached_pages": 610 + index,
        "prompt_tokens_per_s": 21_400.0 if role != "decode" else None,
    }


def _kind_of(sender: int, receiver: int) -> int:
    """Neighbours share a machine; a few pairs have nothing better than messages."""
    return (sender // 2 + receiver // 2) % 2 if (sender + receiver) % 7 else 2


def _link_state(rng: random.Random) -> str:
    return rng.choices(("up", "down", "refused", "testing"), (0.93, 0.03, 0.02, 0.02))[0]


def _link(path: tuple[str, str], state: Any, rng: random.Random) -> Link:
    reasons = {
        "up": "",
        "down": "did not answer for 5 s; tried again in 4 s",
        "refused": "page_size is 16 here and 32 there",
        "testing": "a page is being sent to measure the link",
        "connecting": "waits for the peer's address",
    }
    tested = {"copy": 180e9, "put": 42e9, "message": 2.4e9, "staged": 11e9}[path[0]] * rng.uniform(0.85, 1.1)
    is_up = state == "up"
    return {
        "state": state,
        "reason": reasons[state],
        "path": path[0] if is_up else "",
        "lanes": path[1] if is_up else "",
        "tested_bytes_per_s": tested if is_up else 0.0,
        "bytes_per_s": 0.0,
        "bytes_sent": rng.randrange(10**10) if is_up else 0,
        "in_flight_bytes": 0,
        "queued_bytes": 0,
        "last_heard_s": round(rng.uniform(0, 0.9), 2) if is_up else 7.5,
    }


def _flow(link: Link, rng: random.Random, share: float) -> None:
    if link["state"] != "up":
        return
    if link["bytes_per_s"] and rng.random() < 0.12:
        link["bytes_per_s"], link["in_flight_bytes"], link["queued_bytes"] = 0.0, 0, 0
    elif link["bytes_per_s"] or rng.random() < share:
        link["bytes_per_s"] = round(link["tested_bytes_per_s"] * rng.uniform(0.05, 0.6))
        link["in_flight_bytes"] = rng.randrange(1, 40) * 1_179_648
        link["queued_bytes"] = rng.randrange(4) * 1_179_648
        link["bytes_sent"] += int(link["bytes_per_s"] * TICK_S)


def _told(links: dict[str, Link]) -> dict[str, Link]:
    """Return those of more than `MAX_LINKS` that are not up or have traffic."""
    if len(links) > MAX_LINKS:
        matter = {peer: link for peer, link in links.items() if link["state"] != "up" or link["bytes_per_s"]}
        links = dict(list(matter.items())[:MAX_LINKS])
    return {peer: link.copy() for peer, link in links.items()}


def _rest(card: WorkerCard, rng: random.Random) -> None:
    card["rate"] = None
    drain = card["drain"]
    if drain is None:
        return
    drain["deadline_s"] = max(0.0, drain["deadline_s"] - TICK_S)
    if drain["requests_left"] and rng.random() < 0.1:
        drain["requests_left"] -= 1
    drain["phase"] = "draining" if drain["requests_left"] else "empty"
    card["num_running"] = drain["requests_left"]


def _pages(mood: float, role: Name, rng: random.Random) -> dict[str, int]:
    owned = int(PAGES * mood * 0.5)
    cached = int(PAGES * 0.32)
    moving = rng.randrange(20, 190)
    pages = {
        "owned": owned,
        "cached": cached,
        "exporting": 0 if role == "decode" else moving,
        "importing": 0 if role == "prefill" else moving,
        "quarantined": 24 if mood > 0.85 else 0,
    }
    return {**pages, "free": PAGES - sum(pages.values())}


def _signal_words(queue_s: float | None) -> str:
    if queue_s is None:
        return "No worker is ready; one is needed before anything else."
    if queue_s > 0.9:
        return f"One worker more is next: prompts wait {queue_s:.2f} s in the mean, above the target of 0.90 s."
    return (
        f"Stays as it is: prompts wait {queue_s:.2f} s in the mean; a worker less would make it {queue_s * 1.4:.2f} s."
    )


def _advance(row: RequestRow, now_s: float, rng: random.Random) -> None:
    if row["phase"] == "ended":
        return
    row["duration_s"] = round(now_s - row["arrived_unix_s"], 3)
    prompt_s = (0.3 + row["prompt_tokens"] / 9000) * (4 if row["prompt_tokens"] % 16 == 0 else 1)  # a few are slow
    if row["phase"] == "waiting" and row["duration_s"] > 0.2:
        row["phase"], row["cached_tokens"] = "prompt", row["prompt_tokens"] // rng.choice((1, 2, 3, 100)) // 16 * 16
        row["cached_tokens"] = min(row["cached_tokens"], row["prompt_tokens"] - 1)
    elif row["phase"] == "prompt" and row["duration_s"] > prompt_s:
        row["phase"], row["ttft_s"] = "output", round(prompt_s, 3)
    elif row["phase"] == "output":
        row["output_tokens"] += rng.randrange(4, 12)
        if rng.random() < 0.04:
            row["phase"] = "ended"
            row["outcome"], row["status"] = rng.choice(
                (*[("ok", 200)] * 8, ("unavailable", 503), ("disconnected", 200))
            )


def _cache(workers: list[str], rng: random.Random, now_s: float) -> CacheState:
    names = [f"{rng.getrandbits(64):016x}" for _ in range(24)]
    prefixes: dict[str, Prefix] = {}
    for index, name in enumerate(names):
        parent = names[(index - 1) // 2] if index and index % 6 else ""
        depth = prefixes[parent]["num_tokens"] if parent else 0
        prefixes[name] = {
            "parent": parent,
            "num_tokens": depth + 16 * rng.randrange(1, 30),
            "num_requests": max(1, 900 // (index + 1)),
            "workers": rng.sample(workers, min(len(workers), rng.randrange(1, 4))),
            "text": "",
        }
    wave = 0.03 * math.sin(now_s / 20)
    prompt = 4_210_000 + int((now_s % 1000) * 900)
    hit = 0.58 + wave
    return {
        "window_s": 900.0,
        "prompt_tokens": prompt,
        "cached_tokens": int(prompt * hit),
        "hit_rate": hit,
        "ceiling": 0.74,
        "tiers": {
            "pool": {"pages": 5210, "capacity_pages": PAGES * 4, "saved_pages": None, "restored_pages": None},
            "host": {"pages": 20_800, "capacity_pages": 65_536, "saved_pages": 24_100, "restored_pages": 7320},
            "shared": {"pages": 90_400, "capacity_pages": None, "saved_pages": 61_000, "restored_pages": 12_050},
        },
        "prefixes": prefixes,
    }


def _charts(now_s: float, rng: random.Random) -> Charts:
    units = {
        "requests": "requests/s", "errors": "requests/s", "prompt_tokens": "tokens/s", "output_tokens": "tokens/s",
        "queued": "requests", "running": "requests", "goodput": "share", "ttft_p50": "s", "ttft_p95": "s",
        "itl_p50": "s", "itl_p95": "s", "kv_decode": "share", "kv_prefill": "share", "queue_prefill": "s",
    }  # fmt: skip
    scale = {"s": 0.6, "share": 0.8, "tokens/s": 9000.0, "requests/s": 22.0, "requests": 60.0}
    interval_s, num = 5.0, 720
    begun_s = now_s - now_s % interval_s - interval_s * num
    return {
        "begun_unix_s": begun_s,
        "interval_s": interval_s,
        "series": {
            name: {"unit": unit, "values": _wave(scale[unit], num, begun_s / interval_s, rng.random())}
            for name, unit in units.items()
        },
    }


def _wave(size: float, num: int, first: float, shift: float) -> list[float | None]:
    return [
        None if index < 40 else round(size * (0.7 + 0.25 * math.sin((first + index) / 37 + shift * 9)), 4)
        for index in range(num)
    ]
