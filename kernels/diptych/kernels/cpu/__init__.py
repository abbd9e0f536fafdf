"""CPU kernels in C, float32: matrix products, norms, paged attention. A token has the same bits however computed."""
