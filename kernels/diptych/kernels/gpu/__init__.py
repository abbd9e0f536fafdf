"""Kernels on GPUs, in Triton: one file a kernel, with its torch reference, in rooms by what they compute.

`attention`, `layers`, `recurrent` and `sampling` are the forward pass, in the order of a step; `collectives` adds up
what ranks computed of it; `pages` is KV transfer.
What rooms share is here: `casts` and `grid`. `launcher` starts all of them.
"""
