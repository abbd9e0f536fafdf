"""KV transfer over UCX: RDMA, NVLink, shared memory or TCP, whatever both ends have."""

from __future__ import annotations

from diptych.kvtransfer.transport import InstanceId
from diptych.kvtransfer.ucx.options import UcxOptions
from diptych.kvtransfer.ucx.transport import UcxTransport

__all__ = ["UcxOptions", "UcxTransport", "open_transport"]


def open_transport(instance_id: InstanceId, *, options: UcxOptions) -> UcxTransport:
    """Load UCX and open the transport of this process. Raises `ConfigError` or `TransferError`."""
    return UcxTransport(instance_id, options)
