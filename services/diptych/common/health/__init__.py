"""Serves whether a process is alive, started and ready, as `verdicts.probes` decides. Nothing depends on its load."""
