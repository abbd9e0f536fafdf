"""The decode role: takes KV that prefill computed, verifies it, and generates. Pure.

`core` is the door; `phases` has the states of a room and the table of their transitions.
"""
