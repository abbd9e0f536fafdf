"""A platform in virtual time: the product's own pure cores on a clock that costs nothing. Pure.

Only three things are models: how long a step takes, the wire, and the start of a process.
"""
