"""What `routing_quality.py` is made of: traces, simulated workers, the replay and what is counted of it."""
