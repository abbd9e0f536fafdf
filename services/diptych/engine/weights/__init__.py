"""Weights that a worker copies from one that runs: their memory, its digests, the door of who gives, and who takes."""
