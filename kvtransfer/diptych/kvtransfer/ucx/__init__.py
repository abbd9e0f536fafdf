"""KV transfer over UCX: RDMA, NVLink, shared memory or TCP, whatever both ends have. What workers use by default.

The C in `shim/` owns the thread that makes every UCX call; `shim/shim.h` is its face, `shim/shim_unit.c` its one
translation unit, in parts by folder. Python finds a UCX (`loader`), compiles the shim and declares its face
(`binding`), turns values into its structures (`conversion`, `allocation`) and keeps strangers from its ports (`doors`,
`guests`, `source_filter`). `transport` is what everybody else uses.
"""

from __future__ import annotations

from diptych.kvtransfer.transport import InstanceId
from diptych.kvtransfer.ucx.options import UcxOptions
from diptych.kvtransfer.ucx.transport import UcxTransport

__all__ = ["UcxOptions", "UcxTransport", "open_transport"]


def open_transport(instance_id: InstanceId, *, options: UcxOptions) -> UcxTransport:
    """Load UCX and open the transport of this process. Raises `ConfigError` or `TransferError`."""
    return UcxTransport(instance_id, options)
