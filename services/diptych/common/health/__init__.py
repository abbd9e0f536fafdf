"""Decides whether a process is alive, started and ready, and serves the answers: none depends on its load."""
