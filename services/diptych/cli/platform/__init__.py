"""Runs a whole platform on this machine: its processes, and where other commands find it."""
