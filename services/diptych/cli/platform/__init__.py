"""Runs a whole platform on this machine: its plan, its processes, and where other commands find it."""
