"""A request from its fields to its answer: prepared, sent to a pair, tried again elsewhere, put together.

`pipeline` is the door and `execution` the loop of attempts.
"""
