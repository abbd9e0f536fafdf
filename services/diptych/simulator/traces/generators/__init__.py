"""Loads made from a seed: the same seed gives the same calls. Published figures say what each is like. Pure."""
