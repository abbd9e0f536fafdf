"""A transport inside one process, for tests: really copies pages, and delivers only when told to.

It is the reference for what a transport promises: it passes the same conformance suite as those over a network. The
network between its instances is a value that a test steps, with faults and kills, so that the real cores of prefill and
decode are played in every interleaving.
"""

from diptych.kvtransfer.inproc.network import FaultPlan, InprocNetwork
from diptych.kvtransfer.inproc.transport import InprocTransport

__all__ = ["FaultPlan", "InprocNetwork", "InprocTransport"]
