"""CPU kernels in C: float32 matrix products, norms and paged attention, bit-equal for a token however it is computed."""
