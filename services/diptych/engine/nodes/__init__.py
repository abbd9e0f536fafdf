"""Groups over several nodes: who may join one, how its nodes hear of each other, and that all of them end together.

Node 0 leads: its frontend answers routers and bootstrap, and has rank 0. The frontends of the other nodes hold a stream
to it and start their ranks. `agreement` and `roster` decide, `leading` and `following` hold the two ends of a stream.
"""
