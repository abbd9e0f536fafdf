"""A platform of real processes under traffic with known answers, and what can befall it. `bench/chaos.py` runs it."""
