"""From the logits of a step to its tokens and their log-probabilities: adjust, scan in blocks, cut, choose.

Here belongs every kernel that reads rows as wide as the vocabulary. `sampling` has the wrappers that choose tokens.
"""
