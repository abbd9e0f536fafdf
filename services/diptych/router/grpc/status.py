"""How a call of the gRPC API ends with an error of ours."""

from __future__ import annotations

from typing import Any

import grpc

from diptych.common.errors import DiptychError, Overloaded, Unavailable


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DiptychError) -> None:
    """End the call with the error's status. Raises."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded | Unavailable):
        metadata = (("retry-after", str(error.retry_after_s)),)
    await context.abort(grpc.StatusCode[error.grpc_status], str(error), metadata)
