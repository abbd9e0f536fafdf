"""The prefill role: computes prompts and hands their KV to decode workers. Pure.

`core` is the door; `phases` has the states of a room and the table of their transitions.
"""
