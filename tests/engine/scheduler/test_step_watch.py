from __future__ import annotations

import threading

import pytest

from diptych.engine.scheduler.stepping import LOOK_S, StepGivenUp, StepWatch


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_looks = 0
        self.is_wanted = True
        self.watch = StepWatch(lambda: self.now_s)

    def look(self) -> bool:
        self.num_looks += 1
        return self.is_wanted


def test_a_step_that_nobody_wants_is_given_up_between_two_layers() -> None:
    world = World()
    with pytest.raises(StepGivenUp), world.watch.over(world.look):  # noqa: PT012
        listener = world.watch.listener()
        assert listener is not None
        for layer in range(10):
            world.now_s += LOOK_S
            world.is_wanted = layer < 3
            listener(layer)
    assert world.num_looks == 4
    assert world.watch.listener() is None


def test_a_short_step_never_looks() -> None:
    world = World()
    with world.watch.over(world.look):
        listener = world.watch.listener()
        assert listener is not None
        for layer in range(30):
            world.now_s += LOOK_S / 40
            listener(layer)
    assert world.num_looks == 0


def test_other_threads_are_not_watched() -> None:
    world, seen = World(), []
    with world.watch.over(world.look):
        thread = threading.Thread(target=lambda: seen.append(world.watch.listener()))
        thread.start()
        thread.join()
    assert seen == [None]
