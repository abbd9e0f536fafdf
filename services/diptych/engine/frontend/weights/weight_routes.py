"""Other weights over HTTP, as trainers ask for them: SGLang's paths and fields where they mean the same.

    POST /pause_generation            {"drain_s": 0}
    POST /update_weights_from_disk    {"model_path": "/models/step-7", "weight_version": "7", "in_place": true}
    POST /update_weights_from_tensor  {"files": ["/dev/shm/step-7"], "weight_version": "7", "flush_cache": true}
    POST /continue_generation         {}
    POST /init_weights_update_group   {"master_address": "10.0.0.5", "master_port": 29500, "rank_offset": 1,
                                       "world_size": 3, "group_name": "trainer", "backend": "gloo"}
    POST /update_weights_from_distributed  {"names": [...], "dtypes": [...], "shapes": [...], "group_name": "trainer"}
    POST /destroy_weights_update_group     {"group_name": "trainer"}
    POST /release_memory_occupation   {"tags": ["weights"]}
    POST /resume_memory_occupation    {}
    GET  /weight_version              {"9f2c...": "7"}

A path acts on all instances of the worker, or on one (`?instance=9f2c...`), and answers when it is done. The tensors
are in safetensors files on the worker's host; or they are the body itself, with the other fields in the query. With
`flush_cache` false more of them is to come, and nothing is served until it has. All paths want the operator's token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.requests import Request
from starlette.routing import Route

from diptych.common.refusals import Refusals
from diptych.common.trust.operator_route import Answer, operator_route
from diptych.common.trust.trust import Trust
from diptych.engine.frontend.group import WorkerGroup

POSTS: Final = (
    *("/release_memory_occupation", "/resume_memory_occupation", "/pause_generation", "/continue_generation"),
    *("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"),
    *("/update_weights_from_disk", "/update_weights_from_tensor"),
)
VERSION: Final = "/weight_version"


def weight_routes(
    groups: Callable[[], Sequence[WorkerGroup]], drain_s: float, trust: Trust, refusals: Refusals
) -> list[Route]:
    """Return the paths. `drain_s`: for what runs to finish, where the caller does not say it.

    What reads and does requests is imported at the first one, beside the loop: most workers keep their weights.
    """

    def answering(path: str) -> Callable[[Request], Awaitable[Answer]]:
        async def answer(request: Request) -> Answer:
            handler = await asyncio.to_thread(_handler, path, groups, drain_s)
            return await handler(request)

        return answer

    return [
        operator_route(VERSION, ("GET",), answering(VERSION), trust, refusals),
        *(operator_route(path, ("POST",), answering(path), trust, refusals) for path in POSTS),
    ]


def _handler(
    path: str, groups: Callable[[], Sequence[WorkerGroup]], drain_s: float
) -> Callable[[Request], Awaitable[Answer]]:
    from diptych.engine.frontend.weights.weight_requests import WeightRequests

    return WeightRequests(groups, drain_s).handlers()[path]
