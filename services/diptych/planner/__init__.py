"""The planner: how many workers of which role a load needs, and why. Pure, but for the shells that it names.

`values` is what it sees, says and remembers; `plan` is the door. `capacity` predicts what workers of each role keep of a
load, `sizing` finds the fewest, and the rest decides when to act on it.
"""
