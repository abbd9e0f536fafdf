"""The planner: how many workers of which role a load needs within an SLO, and why. Pure.

`values` is what it sees, says and remembers; `plan` is the door. `demand` and `predict` say what a load costs and how
well workers serve it, `sizing` finds the fewest, and the other modules each decide one thing about acting on it. What a
plan asks of a cluster is in `pools`.
"""
