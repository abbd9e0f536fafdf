"""The NIXL transport, for sites that already run NIXL. Optional: the extra `nixl`, `--kv-backend nixl`.

NIXL moves bytes and delivers notifications; everything else that a transport promises is ours. A thread (`engine`)
makes all its calls, `link` holds what one link has posted, `streams` decides whose turn it is, and links come up and
end by `diptych.kvtransfer.conversation`.
"""

from diptych.kvtransfer.nixl.engine import NixlOptions
from diptych.kvtransfer.nixl.transport import NixlTransport, open_transport

__all__ = ["NixlOptions", "NixlTransport", "open_transport"]
