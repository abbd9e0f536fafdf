"""Structured output: what an output must match, compiled to a mask over the vocabulary for each token."""
