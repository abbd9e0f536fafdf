"""Stages of a pipeline: how hidden states go from one to the next, and which steps all of them have ended."""
