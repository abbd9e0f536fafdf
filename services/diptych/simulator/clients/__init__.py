"""Clients in virtual time: what they do beside sending calls."""
