"""What a layer does to each token by itself: norms, activations, products for a few rows, and experts.

Here belongs a kernel that knows neither requests nor the KV pool: rows go in, rows come out.
"""
