"""Guesses how requests go on, for a step to verify: sources of guesses, each by one idea. Pure.

A guess costs the time to make it and to compute it; it never changes an output. What a source learns of an answer helps
requests of the same tenant, salt and adapter, and nobody else.
"""
