"""Holds what every component needs: options, errors, logs, processes; and in rooms: trust, members, net, health, drain.

Every process uses it, and every package may import it."""
