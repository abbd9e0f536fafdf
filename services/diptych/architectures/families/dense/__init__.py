"""Families of attention over keys and values, and one feed-forward network a layer.

Here belongs what needs nothing else, whatever its norms, biases, windows and soft caps are.
"""
