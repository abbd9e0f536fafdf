"""Structured output: grammars checked in a process of their own, and compiled to a token mask for each position."""
