"""Kernels of the forward pass on GPUs, in Triton: one file a kernel, with its torch reference."""
