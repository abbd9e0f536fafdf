"""A transport inside one process, for tests: really copies pages, and delivers only when told to."""

from diptych.kvtransfer.inproc.network import FaultPlan, InprocNetwork
from diptych.kvtransfer.inproc.transport import InprocTransport

__all__ = ["FaultPlan", "InprocNetwork", "InprocTransport"]
