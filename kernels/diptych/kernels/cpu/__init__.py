"""CPU kernels in C: float32 matrix products, norms and paged attention, bit-equal for a token in any batch."""
