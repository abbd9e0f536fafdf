"""Decides what a step computes: queues, policies, admission, batches, and what sampled tokens mean. Pure.

The cores of the roles (`diptych.prefill`, `diptych.decode`, `diptych.unified`) are made of these parts.
"""
