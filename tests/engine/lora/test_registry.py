from __future__ import annotations

import random

import pytest

from diptych.common.errors import InvalidRequest, NotFound, Overloaded
from diptych.engine.lora.registry import NONE, Loaded, LoraRegistry


def registry(max_loras: int = 2) -> LoraRegistry:
    return LoraRegistry(max_loras, "base")


def test_a_loaded_adapter_has_a_slot_of_its_own() -> None:
    adapters = registry()
    assert adapters.load("b", "fb") == (Loaded("b", 0, "fb"), True)
    assert adapters.load("a", "fa") == (Loaded("a", 1, "fa"), True)
    assert adapters.loaded() == (Loaded("a", 1, "fa"), Loaded("b", 0, "fb"))


def test_loading_the_same_weights_again_changes_nothing_even_when_it_is_full() -> None:
    adapters = registry(1)
    adapters.load("a", "f")
    assert adapters.load("a", "f") == (Loaded("a", 0, "f"), False)


def test_other_weights_under_a_loaded_name_are_refused() -> None:
    adapters = registry()
    adapters.load("a", "f")
    with pytest.raises(InvalidRequest, match="unload it first"):
        adapters.load("a", "g")
    assert adapters.loaded() == (Loaded("a", 0, "f"),)


def test_without_a_free_place_a_load_is_refused() -> None:
    adapters = registry(2)
    adapters.load("a", "f")
    adapters.load("b", "f")
    with pytest.raises(Overloaded, match="--max-loaded-loras"):
        adapters.load("c", "f")
    adapters.unload("b")
    assert adapters.load("c", "f") == (Loaded("c", 1, "f"), True)


def test_a_worker_without_places_says_that_it_takes_none() -> None:
    with pytest.raises(InvalidRequest, match="this worker takes no adapters: start it with --max-loras above 0"):
        registry(0).load("a", "f")


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a,b", "a=b", "ä", "base"])
def test_a_name_that_cannot_be_asked_for_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        registry().load(name, "f")


def test_without_places_there_are_no_adapters() -> None:
    with pytest.raises(InvalidRequest, match="--max-loras"):
        registry(0).load("a", "f")


def test_an_unused_adapter_goes_at_once() -> None:
    adapters = registry(1)
    adapters.load("a", "f")
    assert adapters.unload("a") == 0
    assert adapters.loaded() == ()
    assert adapters.load("b", "f") == (Loaded("b", 0, "f"), True)


def test_an_unloading_adapter_takes_no_requests_and_goes_with_its_last_one() -> None:
    adapters = registry()
    adapters.load("a", "f")
    assert adapters.start(1, "a") == adapters.start(2, "a") == Loaded("a", 0, "f")
    assert adapters.unload("a") is None
    with pytest.raises(NotFound):
        adapters.start(3, "a")
    with pytest.raises(NotFound):
        adapters.unload("a")
    assert adapters.end(1) is None
    assert adapters.end(2) == 0


def test_a_name_is_free_for_other_weights_while_old_requests_run() -> None:
    adapters = registry(2)
    adapters.load("a", "old")
    adapters.start(1, "a")
    adapters.unload("a")
    assert adapters.load("a", "new") == (Loaded("a", 1, "new"), True)
    assert adapters.start(2, "a").fingerprint == "new"
    assert adapters.end(1) == 0
    assert adapters.end(2) is None
    assert adapters.loaded() == (Loaded("a", 1, "new"),)


def test_a_request_without_an_adapter_holds_nothing() -> None:
    adapters = registry()
    assert adapters.start(1, "") is NONE
    assert adapters.end(1) is None


def test_an_unknown_adapter_is_refused() -> None:
    with pytest.raises(NotFound, match="'x'"):
        registry().start(1, "x")


@pytest.mark.parametrize("seed", range(20))
def test_a_slot_is_never_given_twice_and_none_is_lost(seed: int) -> None:
    """Against a naive model: what each running request was promised stays, whatever is loaded and unloaded."""
    rng, adapters = random.Random(seed), registry(3)
    running: dict[int, Loaded] = {}
    named: dict[str, Loaded] = {}
    for room in range(300):
        name = rng.choice("abcd")
        match rng.choice(["load", "unload", "start", "start", "end"]):
            case "load":
                held = {a.number for a in running.values()} | {a.number for a in named.values()}
                if name not in named and len(held) < 3:
                    named[name], is_new = adapters.load(name, str(room))
                    assert is_new
                    assert named[name].number not in held
                elif name not in named:
                    with pytest.raises(Overloaded):
                        adapters.load(name, "f")
            case "unload" if name in named:
                gone = named.pop(name)
                is_used = gone in running.values()
                assert adapters.unload(name) == (None if is_used else gone.number)
            case "start" if name in named:
                running[room] = adapters.start(room, name)
                assert running[room] == named[name]
            case "end" if running:
                ended = rng.choice(list(running))
                adapter = running.pop(ended)
                is_last = adapter not in running.values() and adapter not in named.values()
                assert adapters.end(ended) == (adapter.number if is_last else None)
        assert adapters.loaded() == tuple(named[name] for name in sorted(named))
