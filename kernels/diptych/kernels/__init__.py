"""Kernels and the loaders of their libraries: `cpu` in C, `gpu` in Triton; here what KV transfer shares with both.

Nothing here knows a request or a model: a kernel takes arrays and their shapes, and has a reference that it is tested
against.
"""
