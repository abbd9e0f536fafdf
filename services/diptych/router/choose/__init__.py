"""Which workers a request goes to: views, estimates, indexes of cached prefixes, pairing, and why. Pure.

`policies` has one function a policy; `explain` runs a pure policy again to say why it chose as it did.
"""
