"""Layers that keep a state of fixed size for each request, and the rules by which a token changes it."""
