"""Holds what every component needs: options, errors, logs, processes; in rooms: verdicts, trust, members, net, health.

Every process uses it, and every package may import it."""
