"""One file a model family: its configuration and the names in its checkpoints. No file here computes anything.

Four rooms, from plain to special: `dense`, `experts`, `latent`, `recurrent`. Rule: a family stands in the last of them
that any of its models needs. What several families share is in the one that had it first. `registry` finds them all.
"""
