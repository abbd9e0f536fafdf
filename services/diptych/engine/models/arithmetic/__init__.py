"""The arithmetic of layers other than attention: interfaces, with versions by torch, C kernels and Triton."""
