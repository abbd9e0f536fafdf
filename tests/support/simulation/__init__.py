"""Whole clusters in one process: real scheduler cores, links and transports, a small router, and every kind of fault.

`Cluster` is the thing under test and its faults, `rules` are what must hold after every step, `play` makes random moves
from a seed. Nothing in here waits or has a clock.
"""
