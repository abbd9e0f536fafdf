"""Keeps a set of components running: starts all, restarts those that die while serving, and stops all at the end.

A component that ends with exit code 0 was told to, as after a drain, and is not started again.

All are stopped at once except the first, on which the others depend: it is stopped when they have ended.

Until the platform is ready a death is final, because a second start would fail in the same way. Later the
`RestartPolicy` decides. However `run` ends, no child is left. A child that freezes, or takes more memory than it
may, is ended, and that is a death like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from diptych.cli.platform.child import Child, End
from diptych.cli.platform.log_view import LogView
from diptych.cli.platform.plan import Component
from diptych.common.errors import DiptychError
from diptych.common.lifecycle import Stop
from diptych.common.members.heartbeat import SharedHeartbeat, new_heartbeat
from diptych.common.process_sight import wait_until_out_of_bounds
from diptych.common.restart_policy import GiveUp, Restart, RestartPolicy

_STOP_DEADLINE_S = 10.0


class ComponentFailed(DiptychError):
    """A component died and is not started again."""


class Supervisor:
    """Runs `components`. `wait_until_ready` returns when the platform serves."""

    def __init__(
        self,
        components: Sequence[Component],
        view: LogView,
        wait_until_ready: Callable[[], Awaitable[None]],
        policy: RestartPolicy | None = None,
    ) -> None:
        self._components = components
        self._view = view
        self._wait_until_ready = wait_until_ready
        self._policy = policy or RestartPolicy()
        self._is_ready = False
        self._shall_wait = True  # True: children that are told to stop may finish
        self._failure: ComponentFailed | None = None

    async def run(self, stop: Stop, on_ready: Callable[[], None]) -> None:
        """Run until `stop`; its `hurry` is passed on. Raises `ComponentFailed` when a component can't be kept running.

        Cancelling it kills the children instead of waiting for them.
        """
        async with asyncio.TaskGroup() as tasks:
            first, *others = [tasks.create_task(self._keep_running(component, stop)) for component in self._components]
            others.append(tasks.create_task(self._announce(on_ready)))
            try:
                await self._stop_in_turn(first, others, stop)
            except asyncio.CancelledError:
                self._shall_wait = False
                raise
        if self._failure is not None:
            raise self._failure

    async def _stop_in_turn(self, first: asyncio.Task[None], others: list[asyncio.Task[None]], stop: Stop) -> None:
        await stop.wait()
        self._view.say("stopping")
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        first.cancel()

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await self._wait_until_ready()
        self._is_ready = True
        on_ready()

    async def _keep_running(self, component: Component, stop: Stop) -> None:
        deaths_s: list[float] = []
        while True:
            end = await self._run_once(component, stop)
            if end.was_meant and self._is_ready:
                self._view.say(f"{component.name} was told to stop, and did: it is not started again")
                return
            deaths_s.append(time.monotonic())
            decision = self._decide(component, str(end), deaths_s)
            if isinstance(decision, ComponentFailed):
                self._failure = self._failure or decision
                stop.set()
                return
            self._view.say(f"{component.name} died ({end}): restarting in {decision.delay_s:g} s", level="warning")
            await asyncio.sleep(decision.delay_s)

    def _decide(self, component: Component, end: str, deaths_s: Sequence[float]) -> Restart | ComponentFailed:
        if not self._is_ready:
            return ComponentFailed(f"{component.name} did not start ({end}); its last lines above say why")
        decision = self._policy.decide(deaths_s)
        if isinstance(decision, GiveUp):
            times = f"{decision.num_deaths} times within {decision.window_s:.0f} s"
            return ComponentFailed(f"{component.name} died {times} ({end}): giving up")
        return decision

    async def _run_once(self, component: Component, stop: Stop) -> End:
        """Run the component once and return how it ended. When cancelled, stop it."""
        with new_heartbeat() as (heartbeat, descriptor):
            child = await Child.start(component, lambda line: self._view.show(component.name, line), descriptor)
        watching = asyncio.ensure_future(self._watch(component, child, heartbeat))
        try:
            return await child.wait()
        except asyncio.CancelledError:
            if self._shall_wait and not await _stopped(child, stop):
                self._view.say(
                    f"{component.name} did not stop within {_STOP_DEADLINE_S:.0f} s: killed", level="warning"
                )
            raise
        finally:
            watching.cancel()
            await child.end()

    async def _watch(self, component: Component, child: Child, heartbeat: SharedHeartbeat) -> None:
        """End a component that passes its bounds. Until the platform is ready nobody's silence is judged."""
        reason = await wait_until_out_of_bounds(
            child.pid, heartbeat, component.bounds, is_judged=lambda: self._is_ready
        )
        self._view.say(f"{component.name} was ended: {reason}", level="error")
        child.kill(reason)


async def _stopped(child: Child, stop: Stop) -> bool:
    """Tell a component to stop, and again when it shall hurry; return whether it ended in time."""
    child.terminate()
    hurrying = asyncio.ensure_future(_hurry(child, stop))
    try:
        async with asyncio.timeout(_STOP_DEADLINE_S):
            await child.wait()
    except TimeoutError:
        return False
    finally:
        hurrying.cancel()
    return True


async def _hurry(child: Child, stop: Stop) -> None:
    await stop.hurry.wait()
    child.terminate()
