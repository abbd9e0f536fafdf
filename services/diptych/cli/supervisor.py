"""Keeps a set of components running: starts them all, restarts what dies while serving, stops them all at the end.

Until the platform is ready a death is final: what cannot start will not start better a second time. Later the
`RestartPolicy` decides. However `run` ends, no child is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from diptych.cli.child import Child
from diptych.cli.log_view import LogView
from diptych.cli.plan import Component
from diptych.cli.restart_policy import GiveUp, Restart, RestartPolicy
from diptych.common.errors import DiptychError

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
        self._failure: ComponentFailed | None = None

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Run until `stop` is set. Raises `ComponentFailed` when a component cannot be kept running.

        Cancelling it kills the children instead of waiting for them.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._keep_running(component, stop)) for component in self._components]
            running.append(tasks.create_task(self._announce(on_ready)))
            await stop.wait()
            self._view.say("stopping")
            for task in running:
                task.cancel()
        if self._failure is not None:
            raise self._failure

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await self._wait_until_ready()
        self._is_ready = True
        on_ready()

    async def _keep_running(self, component: Component, stop: asyncio.Event) -> None:
        deaths_s: list[float] = []
        while True:
            end = await self._run_once(component)
            deaths_s.append(time.monotonic())
            decision = self._decide(component, end, deaths_s)
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

    async def _run_once(self, component: Component) -> str:
        """Run the component once and say how it ended. When cancelled, stop it."""
        child = await Child.start(component, lambda line: self._view.show(component.name, line))
        try:
            return await child.wait()
        except asyncio.CancelledError:
            child.terminate()
            try:
                async with asyncio.timeout(_STOP_DEADLINE_S):
                    await child.wait()
            except TimeoutError:
                self._view.say(
                    f"{component.name} did not stop within {_STOP_DEADLINE_S:.0f} s: killed", level="warning"
                )
            raise
        finally:
            await child.end()
