"""Runs forward steps: model, attention, sampling, on the KV pool."""
