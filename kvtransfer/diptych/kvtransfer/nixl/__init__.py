"""The NIXL transport, for sites that already run NIXL. Optional: the extra `nixl`, `--kv-backend nixl`."""

from diptych.kvtransfer.nixl.options import NixlOptions
from diptych.kvtransfer.nixl.transport import NixlTransport, open_transport

__all__ = ["NixlOptions", "NixlTransport", "open_transport"]
